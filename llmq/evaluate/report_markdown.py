"""A report as Markdown, and its figures as text."""

import math
import re
from collections.abc import Sequence

from llmq.evaluate.report import Cell, Report
from llmq.evaluate.results import Metric, Results
from llmq.evaluate.statistics import Comparison, Recovered, Verdict
from llmq.evaluate.training import Training

#: Marks beside a verdict, so that it does not hang on color or reading.
SYMBOLS = {Verdict.BETTER: "▲", Verdict.WORSE: "▼", Verdict.NOISE: "≈", Verdict.UNKNOWN: "?"}

#: Stands where there is no figure.
NOTHING = "\N{EN DASH}"

#: Stands where the run has the metric and the baseline does not.
NO_BASELINE = "no baseline"

#: For readers of a report.
NOTES = (
    "Figures are given ± one standard error.",
    "Where two runs answered the same items, their difference is taken item by item, which makes its error much smaller than the two figures' errors suggest.",
    "Differences without common items are marked unpaired.",
    "Verdicts are at the 95 % level: of twenty comparisons between equal models, one is expected to be wrong.",
)


#: What the rows of `training_row` say.
TRAINING_COLUMNS = ("run", "steps", "fake quantization from step", "held-out loss", "held-out loss, quantized")

TRAINING_NOTE = "Loss in nats a token on rows that are not trained on, before and after the run."


def to_markdown(report: Report) -> str:
    """Write a report as Markdown.

    Args:
        report: The comparison.

    Returns:
        The text, ending in a newline.
    """
    others = [run for run in report.runs if run is not report.baseline]
    parts = ["# What quantization cost", ""]
    parts += [f"- **{_escape(run.label)}**: {_escape(report.summary(run))}." for run in others]
    parts += ["", "## Models", ""] if others else ["## Models", ""]
    parts += _table(
        ("model", "weights", "size", "of the baseline", "ran on"),
        [
            (
                run.label + (" (baseline)" if run is report.baseline else ""),
                run.form,
                megabytes(run.results.model.num_bytes),
                f"{100 * run.relative_size:.0f} %",
                ran_on(run.results),
            )
            for run in report.runs
        ],
        right=(2, 3),
    )
    parts += ["", "## Metrics", ""]
    parts += _table(
        ("metric", *(run.label for run in report.runs)),
        [(row.title, *(figure_of(cell.metric) for cell in row.cells)) for row in report.rows],
        right=range(1, 1 + len(report.runs)),
    )
    if others:
        places = [report.runs.index(run) for run in others]
        parts += ["", f"## Difference to {_escape(report.baseline.label)}", ""]
        parts += _table(
            ("metric", *(run.label for run in others)),
            [(row.title, *(difference_of(row.cells[place]) for place in places)) for row in report.rows],
            right=range(1, 1 + len(others)),
        )
    if report.ptq and report.qat:
        parts += ["", "## Share of the loss that training recovered", ""]
        parts += [f"From {_escape(report.ptq.label)} to {_escape(report.qat.label)}.", ""]
        parts += _table(
            ("metric", "recovered", "verdict"),
            [(row.title, share_of(row.recovered), row.recovered.verdict) for row in report.rows if row.recovered],
            right=(1,),
        )
    if report.trainings:
        parts += ["", "## Training", "", f"{TRAINING_NOTE}", ""]
        parts += _table(TRAINING_COLUMNS, [training_row(training) for training in report.trainings], right=range(1, 5))
    parts += ["", *(f"- {note}" for note in NOTES)]
    return "\n".join(parts) + "\n"


def figure(value: float, stderr: float | None) -> str:
    """A figure with as many digits as its error leaves meaning to, and at least four.

    Args:
        value: The figure.
        stderr: Its standard error, if known.

    Returns:
        As in ``22.77 ± 0.85``.
    """
    decimals = max(0, 3 - _magnitude(value), _decimals(stderr))
    return f"{value:.{decimals}f}" + (f" ± {stderr:.{decimals}f}" if stderr is not None else "")


def figure_of(metric: Metric | None) -> str:
    """A metric's figure, or a dash.

    Args:
        metric: The metric, if there is one.

    Returns:
        As in ``22.77 ± 0.85``.
    """
    return NOTHING if metric is None else figure(metric.value, metric.stderr)


def difference_of(cell: Cell) -> str:
    """A difference with its verdict, or why there is none.

    Args:
        cell: Not the baseline's.

    Returns:
        As in ``+9.61 ± 0.48 ▼ worse``.
    """
    comparison = cell.comparison
    if comparison is None:
        return NOTHING if cell.metric is None else NO_BASELINE
    return f"{change_of(comparison)} {SYMBOLS[comparison.verdict]} {comparison.verdict}"


def change_of(comparison: Comparison) -> str:
    """A difference alone.

    Args:
        comparison: The comparison.

    Returns:
        As in ``+9.61 ± 0.48``, with ``unpaired`` behind it where it was.
    """
    decimals = _decimals(comparison.stderr) if comparison.stderr else max(0, 3 - _magnitude(comparison.difference))
    text = f"{comparison.difference + 0.0:+.{decimals}f}".replace("-", "\N{MINUS SIGN}")
    if comparison.stderr is not None:
        text += f" ± {comparison.stderr:.{decimals}f}" + ("" if comparison.num_pairs else " unpaired")
    return text


def share_of(found: Recovered | None) -> str:
    """A recovered share in percent, or a dash.

    Args:
        found: The share, if there is one.

    Returns:
        As in ``47 ± 6 %``.
    """
    if found is None or found.share is None:
        return NOTHING
    error = "" if found.stderr is None else f" ± {100 * found.stderr:.0f}"
    return f"{100 * found.share:.0f}{error} %".replace("-", "\N{MINUS SIGN}")


def training_row(training: Training) -> tuple[str, ...]:
    """A training run in figures.

    Args:
        training: The run.

    Returns:
        A cell for each of `TRAINING_COLUMNS`.
    """
    steps = str(training.losses[-1][0]) if training.losses else "0"
    start = NOTHING if training.fake_quant_from is None else str(training.fake_quant_from)
    curves = (training.held_out, training.held_out_quantized)
    changes = (f"{curve[0][1]:.4f} → {curve[-1][1]:.4f}" if curve else NOTHING for curve in curves)
    return training.label, steps, start, *changes


def megabytes(num_bytes: int) -> str:
    """A size in decimal megabytes.

    Args:
        num_bytes: Bytes.

    Returns:
        As in ``73.1 MB``.
    """
    return f"{num_bytes / 1e6:,.1f} MB"


def ran_on(results: Results) -> str:
    """Backend and compute type, for people to read.

    Args:
        results: Of a run.

    Returns:
        As in ``gpu, bfloat16``.
    """
    return ", ".join(str(results.backend[key]) for key in ("name", "dtype") if results.backend.get(key))


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def _decimals(stderr: float | None) -> int:
    """Decimals that show two digits of an error."""
    return max(0, 1 - _magnitude(stderr)) if stderr else 0


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    rule = ["---:" if place in right else "---" for place in range(len(columns))]
    head, *body = ([_escape(cell) for cell in line] for line in (columns, *rows))
    return [f"| {' | '.join(line)} |" for line in (head, rule, *body)]


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line; an underscore inside a word means nothing to it."""
    return re.sub(r"[\\`*\[\]<>|&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
