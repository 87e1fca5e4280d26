"""Runs side by side: which differences to the baseline are more than noise.

`build_report` holds every run against one of them, item by item where the items are the same;
`llmq.evaluate.report_markdown` and `llmq.evaluate.report_html` write that down.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.errors import ConfigError
from llmq.evaluate.results import Metric, Results
from llmq.evaluate.statistics import Comparison, Recovered, Sample, Verdict, compare, recovered
from llmq.evaluate.training import Training

#: Options that may differ between runs that are compared: what is compared, and how work was cut up.
_FREE = frozenset({"tasks", "backend", "kv_cache_dtype", "batch_size", "tokens_per_call", "reference"})


@dataclass(frozen=True, slots=True)
class Run:
    """A column.

    Attributes:
        label: Unique among the runs.
        file: Where it was read.
        form: How the weights are stored, for people to read.
        relative_size: Bytes over those of the baseline.
        results: All of it.
    """

    label: str
    file: Path
    form: str
    relative_size: float
    results: Results


@dataclass(frozen=True, slots=True)
class Cell:
    """A metric of a run.

    Attributes:
        metric: The figure; None where the run has none.
        comparison: Against the baseline's; None for the baseline itself or where one is missing.
    """

    metric: Metric | None
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of every run.

    Attributes:
        name: ``GROUP/METRIC``.
        higher_is_better: Which way is up.
        cells: One for each run.
        recovered: The share of the loss from baseline to PTQ that QAT won back, where asked for.
    """

    name: str
    higher_is_better: bool
    cells: tuple[Cell, ...]
    recovered: Recovered | None

    @property
    def title(self) -> str:
        """The name, and an arrow to where better is."""
        return f"{self.name} {'↑' if self.higher_is_better else '↓'}"


@dataclass(frozen=True, slots=True)
class Report:
    """The comparison.

    Attributes:
        runs: In the order given.
        baseline: The run the others are held against.
        ptq, qat: The runs between which a loss was won back; None where not asked for.
        rows: One for each metric.
        trainings: Runs of ``llmq qat``.
    """

    runs: tuple[Run, ...]
    baseline: Run
    ptq: Run | None
    qat: Run | None
    rows: tuple[Row, ...]
    trainings: tuple[Training, ...] = ()

    def summary(self, run: Run) -> str:
        """What a run amounts to, in a sentence.

        Args:
            run: Not the baseline.

        Returns:
            As in ``0.51 times the baseline's size; worse on 1, inside the noise on 3 of 4 metrics``.
        """
        column = self.runs.index(run)
        comparisons = [row.cells[column].comparison for row in self.rows]
        verdicts = [comparison.verdict for comparison in comparisons if comparison]
        counts = [f"{verdict} on {verdicts.count(verdict)}" for verdict in Verdict if verdict in verdicts]
        told = f"{', '.join(counts)} of {len(verdicts)} metrics" if counts else "no metric in common"
        return f"{run.relative_size:.2f} times the baseline's size; {told}"


def build_report(
    runs: Sequence[tuple[Path, Results]],
    *,
    baseline: str | None = None,
    ptq: str | None = None,
    qat: str | None = None,
    trainings: Sequence[Training] = (),
) -> Report:
    """Compare runs.

    Args:
        runs: Files and what they hold, at least one.
        baseline: Which run to hold the others against: its place from 1, the last part of its model's
            name, or the name of its file with or without ending. None takes the first.
        ptq: The run of the baseline quantized without training, named likewise.
        qat: The run of it quantized with training.
        trainings: Runs of ``llmq qat``, to be shown beside.

    Returns:
        The comparison.

    Raises:
        ConfigError: There is no run, one is not found, only one of `ptq` and `qat` is given, or runs differ in an
            option that changes their numbers.
    """
    if not runs:
        raise ConfigError("runs: hold no result of llmq eval; give one, runs of llmq qat are shown beside it.")
    if (ptq is None) != (qat is None):
        raise ConfigError("ptq and qat: belong together; name both runs, or none.")
    labels = _labels(runs)
    at = 0 if baseline is None else _find(runs, labels, "baseline", baseline)
    triple = None
    if ptq is not None and qat is not None:
        triple = (at, _find(runs, labels, "ptq", ptq), _find(runs, labels, "qat", qat))
        if len({*triple}) < 3:
            raise ConfigError(f"ptq={ptq!r} and qat={qat!r}: must be two runs other than the baseline, {labels[at]!r}.")
    for path, results in runs:
        _check_comparable(path, results, *runs[at])
    base_bytes = runs[at][1].model.num_bytes
    columns = tuple(
        Run(label, path, _form(results), results.model.num_bytes / max(base_bytes, 1), results)
        for label, (path, results) in zip(labels, runs, strict=True)
    )
    names = dict.fromkeys(name for _, results in runs for name in results.metrics)
    rows = tuple(_row(name, [results for _, results in runs], at, triple) for name in names)
    before, after = (columns[triple[1]], columns[triple[2]]) if triple else (None, None)
    return Report(columns, columns[at], before, after, rows, tuple(trainings))


def _labels(runs: Sequence[tuple[Path, Results]]) -> list[str]:
    names = [_short_name(results) for _, results in runs]
    labels: list[str] = []
    for name, (path, _) in zip(names, runs, strict=True):
        label = name if names.count(name) == 1 else f"{name} ({path.stem})"
        labels.append(label if label not in labels else f"{label} #{len(labels) + 1}")
    return labels


def _short_name(results: Results) -> str:
    return results.model.name.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or results.model.name


def _find(runs: Sequence[tuple[Path, Results]], labels: Sequence[str], option: str, wanted: str) -> int:
    """The place of a run that the user named; a name that fits several is refused like one that fits none."""
    if wanted.isdecimal() and 0 < int(wanted) <= len(runs):
        return int(wanted) - 1
    names = [
        {label, _short_name(results), results.model.name, str(path), path.name, path.stem}
        for label, (path, results) in zip(labels, runs, strict=True)
    ]
    found = [place for place, known in enumerate(names) if wanted in known]
    if len(found) != 1:
        choices = ", ".join(f"{place} ({path.stem})" for place, (path, _) in enumerate(runs, 1))
        fits = "several runs" if found else "no run"
        raise ConfigError(f"{option}={wanted!r}: fits {fits}; name one of {choices}.")
    return found[0]


def _check_comparable(path: Path, results: Results, base_path: Path, base: Results) -> None:
    """Refuse runs whose figures differ for other reasons than their models."""
    mine, theirs = _settings(results), _settings(base)
    for field in mine:
        if field in theirs and mine[field] != theirs[field]:
            raise ConfigError(
                f"{path}: was run with {field}={mine[field]!r}, {base_path} with {theirs[field]!r}; runs are compared "
                "when they differ in the model alone, so repeat one of them."
            )


def _settings(results: Results) -> dict[str, Any]:
    """What must be equal where both runs have it: options, one by one, and versions of tasks."""
    settings: dict[str, Any] = {}
    for field, value in sorted(results.config.items()):
        if field in _FREE:
            continue
        settings |= (
            {f"{field}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {field: value}
        )
    return settings | {f"version of {key}": value for key, value in results.versions.items() if key.startswith("task ")}


def _form(results: Results) -> str:
    quantization = results.model.quantization
    if not quantization:
        form = results.model.format
    else:
        group = quantization.get("group_size")
        symmetric = quantization.get("symmetric")
        form = str(quantization.get("scheme", results.model.format)) + (f" g{group}" if group else "")
        form += "" if symmetric is None else " sym" if symmetric else " asym"
    kv = results.config.get("kv_cache_dtype", "auto")
    return form if kv in (None, "auto") else f"{form}, {kv} KV cache"


def _row(name: str, runs: Sequence[Results], baseline: int, triple: tuple[int, int, int] | None) -> Row:
    metrics = [results.metrics.get(name) for results in runs]
    higher = next(metric.higher_is_better for metric in metrics if metric)
    samples = [_sample(results, name) for results in runs]
    base = samples[baseline]
    cells = tuple(
        Cell(
            metric,
            compare(sample, base, higher_is_better=higher) if sample and base and place != baseline else None,
        )
        for place, (metric, sample) in enumerate(zip(metrics, samples, strict=True))
    )
    found = None
    if triple:
        before, ptq, qat = (samples[place] for place in triple)
        if before and ptq and qat:
            found = recovered(before, ptq, qat, higher_is_better=higher)
    return Row(name, higher, cells, found)


def _sample(results: Results, name: str) -> Sample | None:
    """A metric with its items on the scale of its value: through the link's tangent, so that their mean is the value."""
    metric = results.metrics.get(name)
    if metric is None:
        return None
    items = np.array(results.items.get(name, ()))
    if metric.link == "exp" and len(items):
        items = metric.value * (1 + items - items.mean())
    ids = tuple(results.item_ids.get(name, ()))
    return Sample(metric.value, metric.stderr, items, ids if len(ids) == len(items) else ())
