"""Reports: what is compared with what, which words are used, and a document that is safe to open."""

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.errors import ConfigError
from llmq.evaluate.report import Report, build_report
from llmq.evaluate.report_html import to_html
from llmq.evaluate.report_markdown import figure, to_markdown
from llmq.evaluate.results import EvaluatedModel, Metric, Results, read_results
from llmq.evaluate.statistics import Recovery, Verdict

CONFIG = {"tasks": ["hellaswag"], "limit": 100, "num_fewshot": 0, "window": 1024, "data_sha256": {"hellaswag": "ab"}}


def run(
    name: str,
    *,
    right: list[float] | None = None,
    losses: list[float] | None = None,
    num_bytes: int = 100_000_000,
    quantization: dict[str, Any] | None = None,
    coverage: list[dict[str, Any]] | None = None,
    sensitivity: dict[str, float] | None = None,
    config: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
    metrics: dict[str, Metric] | None = None,
) -> Results:
    """A result file, with accuracy items and window losses."""
    figures, items, ids = dict(metrics or {}), {}, {}
    for metric, values in (("hellaswag/acc", right), ("perplexity/token", losses)):
        if values is None:
            continue
        mean, error = float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))
        if metric == "perplexity/token":
            mean = math.exp(mean)
            figures[metric] = Metric(value=mean, stderr=mean * error, higher_is_better=False, link="exp")
        else:
            figures[metric] = Metric(value=mean, stderr=error, higher_is_better=True)
        items[metric], ids[metric] = list(values), [str(i) for i in range(len(values))]
    return Results(
        model=EvaluatedModel(
            name=name,
            format="llmq artifact" if quantization else "huggingface",
            weights_sha256=None,
            num_bytes=num_bytes,
            quantization=quantization,
            coverage=coverage or [],
            sensitivity=sensitivity or {},
        ),
        backend={"name": "gpu", "dtype": "bfloat16"},
        config={**CONFIG, **(config or {})},
        versions={"llmq": "0.1.0", "task hellaswag": "1.0", **(versions or {})},
        metrics=figures,
        items=items,
        item_ids=ids,
    )


def coverage(level: float) -> list[dict[str, Any]]:
    return [
        {"name": f"model.layers.{layer}.{module}.weight", "sqnr_db": level + layer}
        for layer in range(4)
        for module in ("self_attn.q_proj", "mlp.down_proj")
    ] + [{"name": "model.norm.weight", "sqnr_db": None}]


RIGHT = [1.0] * 42 + [0.0] * 58
LOSSES = [3.0 + 0.1 * (i % 5) for i in range(16)]
INT4 = {"scheme": "int4_blockwise", "group_size": 64, "symmetric": False}
INT8 = {"scheme": "int8_per_channel", "group_size": None, "symmetric": True}


def three() -> list[tuple[Path, Results]]:
    flipped = [1 - x if i in (3, 50, 60) else x for i, x in enumerate(RIGHT)]
    noisy = [x + 0.001 * (-1) ** i for i, x in enumerate(LOSSES)]
    worse = [x + 0.35 + 0.01 * (i % 3) for i, x in enumerate(LOSSES)]
    return [
        (Path("runs/base.json"), run("models/smol", right=RIGHT, losses=LOSSES, num_bytes=270_000_000)),
        (
            Path("runs/int8.json"),
            run("out/smol-int8", right=flipped, losses=noisy, quantization=INT8, coverage=coverage(40.0)),
        ),
        (
            Path("runs/int4.json"),
            run(
                "out/smol-int4/",
                right=RIGHT,
                losses=worse,
                num_bytes=90_000_000,
                quantization=INT4,
                coverage=coverage(18.0),
            ),
        ),
    ]


@pytest.fixture(scope="module")
def report() -> Report:
    return build_report(three())


def test_what_is_compared(report: Report) -> None:
    assert [run.label for run in report.runs] == ["smol", "smol-int8", "smol-int4"]
    assert [run.form for run in report.runs] == [
        "huggingface",
        "int8_per_channel sym",
        "int4_blockwise g64 asym",
    ]
    accuracy, perplexity = report.rows
    assert [cell.comparison and cell.comparison.verdict for cell in accuracy.cells] == [
        None,
        Verdict.NOISE,
        Verdict.NOISE,
    ]
    assert [cell.comparison and cell.comparison.verdict for cell in perplexity.cells] == [
        None,
        Verdict.NOISE,
        Verdict.WORSE,
    ]
    difference = perplexity.cells[2].comparison
    before, after = (math.exp(np.mean(run.results.items["perplexity/token"])) for run in report.runs[::2])
    assert difference.difference == pytest.approx(after - before)
    # The delta method, item by item: far less than the figures' own errors.
    items = [np.array(run.results.items["perplexity/token"]) for run in report.runs[::2]]
    expected = np.std(after * items[1] - before * items[0], ddof=1) / 4
    assert difference.stderr == pytest.approx(expected)
    assert difference.num_pairs == 16


def test_markdown_in_full() -> None:
    runs = three()
    text = to_markdown(build_report([runs[0], runs[2]]))
    assert (
        text
        == """\
# What quantization cost

- **smol-int4**: 0.33 times the baseline's size; worse on 1, inside the noise on 1 of 2 metrics.

## Models

| model | weights | size | of the baseline | ran on |
| --- | --- | ---: | ---: | --- |
| smol (baseline) | huggingface | 270.0 MB | 100 % | gpu, bfloat16 |
| smol-int4 | int4_blockwise g64 asym | 90.0 MB | 33 % | gpu, bfloat16 |

## Metrics

| metric | smol | smol-int4 |
| --- | ---: | ---: |
| hellaswag/acc ↑ | 0.4200 ± 0.0496 | 0.4200 ± 0.0496 |
| perplexity/token ↓ | 24.23 ± 0.91 | 34.70 ± 1.31 |

## Difference to smol

| metric | smol-int4 |
| --- | ---: |
| hellaswag/acc ↑ | +0.000 ± 0.000 ≈ inside the noise |
| perplexity/token ↓ | +10.48 ± 0.41 ▼ worse |

- Figures are given ± one standard error.
- Where two runs answered the same items, their difference is taken item by item, which makes its error much smaller \
than the two figures' errors suggest.
- Differences without common items are marked unpaired.
- Verdicts are at the 95 % level: of twenty comparisons between equal models, one is expected to be wrong.
"""
    )


def test_figures_from_elsewhere() -> None:
    scores = {"bf16": 0.4806, "int8": 0.4914, "int4": 0.4872}
    runs = [
        (
            Path(f"{name}.json"),
            run(name, metrics={"truthfulqa_mc2/acc": Metric(value=value, stderr=0.0165, higher_is_better=True)}),
        )
        for name, value in scores.items()
    ]
    text = to_markdown(build_report(runs))
    assert "| truthfulqa_mc2/acc ↑ | 0.4806 ± 0.0165 | 0.4914 ± 0.0165 | 0.4872 ± 0.0165 |" in text
    assert "| +0.011 ± 0.023 unpaired ≈ inside the noise | +0.007 ± 0.023 unpaired ≈ inside the noise |" in text


def test_the_share_that_training_recovered() -> None:
    runs = three()
    half = [x + 0.18 + 0.01 * (i % 3) for i, x in enumerate(LOSSES)]
    runs.append((Path("runs/qat.json"), run("out/smol-qat", right=RIGHT, losses=half, num_bytes=90_000_000)))
    report = build_report(runs, ptq="int4", qat="smol-qat")
    accuracy, perplexity = (row.recovered for row in report.rows)
    assert accuracy.verdict is Recovery.NO_LOSS
    assert perplexity.verdict is Recovery.GAIN
    values = [run.results.metrics["perplexity/token"].value for run in report.runs]
    assert perplexity.share == pytest.approx((values[3] - values[2]) / (values[0] - values[2]))
    text = to_markdown(report)
    assert "## Share of the loss that training recovered\n\nFrom smol-int4 to smol-qat." in text
    assert re.search(r"\| perplexity/token ↓ \| 5\d ± \d % \| gain \|", text)
    assert "| hellaswag/acc ↑ | – | no loss to recover |" in text  # noqa: RUF001
    assert "Share of the loss that training recovered" in to_html(report)
    no_gain = build_report([*runs[:3], (runs[3][0], runs[2][1])], ptq="3", qat="4")
    assert no_gain.rows[1].recovered.verdict is Recovery.NO_GAIN
    assert "no gain" in to_markdown(no_gain)


@pytest.mark.parametrize("baseline", ["2", "smol-int8", "out/smol-int8", "int8", "int8.json", "runs/int8.json"])
def test_a_baseline_has_many_names(baseline: str) -> None:
    assert build_report(three(), baseline=baseline).baseline.label == "smol-int8"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"baseline": "4"}, "baseline='4': fits no run; name one of 1 (base), 2 (int8), 3 (int4)."),
        ({"ptq": "int4"}, "ptq and qat: belong together; name both runs, or none."),
        ({"ptq": "1", "qat": "2"}, "ptq='1' and qat='2': must be two runs other than the baseline, 'smol'."),
    ],
)
def test_runs_that_are_not_found(names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_report(three(), **names)
    assert str(caught.value) == message


def test_models_of_one_name_are_told_apart() -> None:
    runs = [(Path(f"{place}/run.json"), run("smol", right=RIGHT)) for place in "abc"]
    report = build_report(runs)
    assert [run.label for run in report.runs] == ["smol (run)", "smol (run) #2", "smol (run) #3"]
    with pytest.raises(ConfigError, match=r"baseline='smol': fits several runs"):
        build_report(runs, baseline="smol")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"config": {"limit": 50}}, "limit=50, base.json with 100"),
        ({"config": {"num_fewshot": 5}}, "num_fewshot=5, base.json with 0"),
        ({"config": {"window": 512}}, "window=512, base.json with 1024"),
        ({"config": {"data_sha256": {"hellaswag": "cd"}}}, "data_sha256.hellaswag='cd', base.json with 'ab'"),
        ({"versions": {"task hellaswag": "2.0"}}, "version of task hellaswag='2.0', base.json with '1.0'"),
    ],
)
def test_runs_that_differ_in_more_than_the_model(changes: dict[str, Any], told: str) -> None:
    runs = [(Path("base.json"), run("base", right=RIGHT)), (Path("other.json"), run("other", right=RIGHT, **changes))]
    with pytest.raises(ConfigError) as caught:
        build_report(runs)
    assert str(caught.value) == (
        f"other.json: was run with {told}; runs are compared when they differ in the model alone, so repeat one of them."
    )


def test_what_may_differ() -> None:
    other = run(
        "other",
        right=RIGHT,
        config={"tasks": ["hellaswag", "piqa"], "data_sha256": {"hellaswag": "ab", "piqa": "cd"}, "kv_cache_dtype": "int8", "tokens_per_call": 64},
        versions={"llmq": "0.2.0", "task piqa": "1.0"},
    )  # fmt: skip
    report = build_report([(Path("a.json"), run("base", right=RIGHT)), (Path("b.json"), other)])
    assert report.runs[1].form == "huggingface, int8 KV cache"


def test_a_metric_that_only_one_run_has() -> None:
    kl = {"divergence/kl_mean": Metric(value=0.0054, stderr=0.0002, higher_is_better=False)}
    runs = [(Path("a.json"), run("base", right=RIGHT)), (Path("b.json"), run("other", losses=LOSSES, metrics=kl))]
    text = to_markdown(build_report(runs))
    assert "| divergence/kl_mean ↓ | – | 0.005400 ± 0.000200 |" in text  # noqa: RUF001
    assert "| divergence/kl_mean ↓ | no baseline |" in text
    assert "| hellaswag/acc ↑ | – |" in text  # noqa: RUF001
    assert to_html(build_report(runs)).count("no baseline") == 2  # also of the perplexity
    assert "no metric in common" in text
    assert "<svg viewBox" not in to_html(build_report(runs))


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (22.7704, 2.514, "22.77 ± 2.51"),
        (22.7704, 0.0214, "22.770 ± 0.021"),
        (0.42, 0.0496, "0.4200 ± 0.0496"),
        (12345.6, 130.2, "12346 ± 130"),
        (0.00544745, 0.000245, "0.005447 ± 0.000245"),
        (1.0, None, "1.000"),
        (0.0, 0.0, "0.000 ± 0.000"),
    ],
)
def test_digits(value: float, stderr: float | None, text: str) -> None:
    assert figure(value, stderr) == text


class Checker(HTMLParser):
    """Elements are closed in order, and nothing refers outside."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "href", "srcset", "style", "xlink:href"), (tag, name)
            if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
                assert math.isfinite(float(value)), (tag, name, value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(checker.seen)
    assert not re.search(r"https?:|//|@import|url\(", html)
    return checker


def test_html_is_whole_and_stands_alone(report: Report) -> None:
    html = to_html(report)
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">')
    found = checked(html)
    text = " ".join(" ".join(found.text).split())
    for told in ("smol-int8", "int4_blockwise g64 asym", "24.23 ± 0.91", "▼ worse", "≈ inside the noise", "90.0 MB"):
        assert told in text
    assert found.seen.count("figure") == 2 + 2  # two metrics, two modules
    for svg in re.findall(r'<svg viewBox="0 0 360 230"[^>]*>', html):
        assert 'role="img"' in svg
        assert 'aria-label="' in svg
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport" content="width=device-width' in html
    assert "layer 0, self_attn.q_proj" in text


def test_sensitivity_is_plotted_where_it_was_measured() -> None:
    costs = {f"model.layers.{layer}.mlp.{{gate_proj,up_proj}}": 0.001 * 2**layer for layer in range(4)}
    costs |= {f"model.layers.{layer}.mlp.down_proj": 0.002 for layer in range(4)} | {"elsewhere": 1.0}
    base, mixed = run("base", right=RIGHT), run("mixed", right=RIGHT, sensitivity=costs)
    html = to_html(build_report([(Path("a.json"), base), (Path("b.json"), mixed)]))
    found = checked(html)
    text = " ".join(" ".join(found.text).split())
    assert "mlp.{gate_proj, up_proj}" in text
    assert "layer 3, mlp.{gate_proj, up_proj} 0.008" in text
    assert "elsewhere" not in text
    assert text.count("1e-3 2e-3 5e-3") == 2  # both plots have one axis
    doubled, level = (
        np.array([point.split(",") for point in line.split()], float)[:, 1]
        for line in re.findall(r'<polyline class="line s1" points="([^"]*)"', html)
    )
    assert np.diff(doubled) == pytest.approx(np.diff(doubled)[0], abs=0.2)  # equal ratios are equal steps
    assert (np.diff(doubled) < -10).all()
    assert np.ptp(level) == 0
    without = to_html(build_report([(Path("a.json"), base), (Path("b.json"), run("mixed", right=RIGHT))]))
    assert "Sensitivity by layer" not in without


def test_digits_of_costs_over_many_powers_of_ten() -> None:
    costs = {f"model.layers.{layer}.o_proj": 10.0**-layer for layer in range(9)}
    html = to_html(build_report([(Path("a.json"), run("m", right=RIGHT, sensitivity=costs))]))
    assert [f">1e-{power}<" in html for power in range(1, 9)] == [True] * 8
    assert ">1<" in html
    assert ">5e-3<" not in html


HOSTILE = "</title></style><script>alert(1)</script>\"' onload=x | `*_[a](b) {{ 7*7 }} \n# x"


def test_hostile_names_stay_text() -> None:
    metrics = {HOSTILE: Metric(value=1.0, stderr=0.1, higher_is_better=True)}
    evil = run(
        HOSTILE,
        metrics=metrics,
        coverage=[{"name": f"m.1.{HOSTILE}", "sqnr_db": 3.0}],
        sensitivity={f"m.1.{HOSTILE}": 0.1},
        quantization={"scheme": HOSTILE},
    )
    report = build_report([(Path("a.json"), evil), (Path("b.json"), run("base", metrics=metrics))])
    html = to_html(report)
    found = checked(html.replace("//", ""))
    assert "alert(1)" in " ".join(found.text)
    assert "49" not in html
    markdown = to_markdown(report)
    assert "<script" not in markdown.replace("\\<", "")
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {6, 4, 3}


def edits(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place in a JSON value, with what someone may have made of it; `...` removes it."""
    if path:
        yield from ((path, other) for other in (..., None, [], {}, "tea", -1, 1e400, True, {"a": []}, [None], [[]]))
    if isinstance(value, dict):
        for key in value:
            yield from edits(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from edits(value[0], (*path, 0))


def test_edited_files_are_reported_or_refused(tmp_path: Path) -> None:
    base, other = three()[0], three()[2]
    path = tmp_path / "r.json"
    whole = json.loads(other[1].model_copy(update={"samples": {}}).model_dump_json())
    outcomes = Counter()
    for place, value in edits(whole):
        changed = copy.deepcopy(whole)
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        if value is ...:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
        path.write_text(json.dumps(changed))
        message = ""
        try:
            report = build_report([base, (path, read_results(path))])
            to_markdown(report)
            checked(to_html(report))
        except ConfigError as err:
            message = str(err)
        outcomes[bool(message)] += 1
        assert not message or message.startswith(f"{path}: "), message
    assert min(outcomes[True], outcomes[False]) > 50


def test_one_run_alone() -> None:
    alone = build_report(three()[:1])
    assert "## Difference" not in to_markdown(alone)
    checked(to_html(alone))


def test_sizes_and_values_that_coincide_still_plot() -> None:
    same = [(Path(f"{name}.json"), run(name, right=RIGHT, losses=LOSSES)) for name in ("a", "b" * 60, "c")]
    found = checked(to_html(build_report(same)))
    assert "b" * 23 + "…" in found.text
