"""A report as one HTML file: no script, nothing from the network, plots as inline SVG.

Geometry is computed here, in the units of each plot's view box; the template draws it. Everything
that comes from a result file passes through the template's escaping.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from llmq.evaluate import report_markdown as text
from llmq.evaluate.report import Report, Row
from llmq.evaluate.statistics import Z_95, Verdict
from llmq.evaluate.training import Curve, Training

#: Plots of size against quality at most; the tables have every metric.
_MAX_PLOTS = 12

#: Layers listed by name, those with the most error first.
_NUM_WORST = 8

#: Points of a curve; more than there are pixels show nothing.
_MAX_POINTS = 300

#: What the curves of a training run are.
_CURVES = ("training loss", "held-out loss", "held-out loss, quantized")

#: Powers of ten on an axis from which on only they are labeled.
_MANY_POWERS = 6

#: View box of a plot, and the plotted area in it.
_WIDTH, _HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 34

#: Characters of a label that fit beside its point, and how wide one is.
_LABEL_CHARS, _CHAR_WIDTH = 24, 6.6

#: Points that would cover each other stand so far apart.
_APART = 11

_LAYER = re.compile(r"\.(\d+)\.(.+?)(?:\.weight)?$")


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to pixels, linearly."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values inside the range, with their places."""
        rough = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough)
        decimals = max(0, -math.floor(math.log10(step)) + (1 if abs(step / power - 2.5) < 1e-9 else 0))
        first = math.ceil(self.low / step)
        values = [number * step for number in range(first, math.floor(self.high / step) + 1)]
        return [(self(value), f"{value + 0.0:.{decimals}f}") for value in values]


def _scale(values: Sequence[float], start: float, end: float, *, margin: float = 0.12) -> _Scale:
    low, high = min(values), max(values)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return _Scale(low - room, high + room, start, end)


def to_html(report: Report) -> str:
    """Write a report as HTML.

    Args:
        report: The comparison.

    Returns:
        A whole document.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    layers, costs = _layers(report), _costs(report)
    return environment.get_template("report.html.j2").render(
        report=report,
        write=text,
        symbols=text.SYMBOLS,
        classes={verdict: verdict.name.lower() for verdict in Verdict},
        notes=text.NOTES,
        plots=[_quality_plot(report, row) for row in report.rows if _is_plotted(row)][:_MAX_PLOTS],
        layers=_layer_plots(layers),
        layer_series=[place for place, found in enumerate(layers) if found],
        worst=_worst(report, layers),
        costs=_layer_plots(costs, is_log=True),
        cost_series=[place for place, found in enumerate(costs) if found],
        dearest=_dearest(report, costs),
        trainings=[_training_plot(training) for training in report.trainings],
        curves=_CURVES,
        width=_WIDTH,
        height=_HEIGHT,
        area={"left": _LEFT, "right": _WIDTH - _RIGHT, "top": _TOP, "bottom": _HEIGHT - _BOTTOM},
    )


def _is_plotted(row: Row) -> bool:
    return sum(cell.metric is not None for cell in row.cells) > 1


def _quality_plot(report: Report, row: Row) -> dict[str, Any]:
    """Sizes against values. A bar is the 95 % interval of the difference to the baseline, drawn around the value."""
    points: list[dict[str, Any]] = []
    for place, (run, cell) in enumerate(zip(report.runs, row.cells, strict=True)):
        if cell.metric is None:
            continue
        stderr = cell.comparison.stderr if cell.comparison else None
        points.append(
            {
                "series": place % 6,
                "label": _shortened(run.label),
                "size": run.results.model.num_bytes / 1e6,
                "value": cell.metric.value,
                "reach": Z_95 * stderr if stderr else 0.0,
                "told": f"{run.label}: {text.megabytes(run.results.model.num_bytes)}, {text.figure_of(cell.metric)}",
                "is_baseline": run is report.baseline,
            }
        )
    x = _scale([point["size"] for point in points], _LEFT, _WIDTH - _RIGHT)
    ends = [point["value"] + sign * point["reach"] for point in points for sign in (-1, 1)]
    y = _scale(ends, _HEIGHT - _BOTTOM, _TOP)
    taken: list[float] = []
    for point in points:
        at, reach = point["value"], point["reach"]
        place = x(point["size"])
        while any(abs(place - other) < _APART for other in taken):
            place += _APART
        taken.append(place)
        point |= {"x": round(place, 1), "y": y(at), "low": y(at - reach), "high": y(at + reach)}
    _place_labels(points)
    baseline = next((point["y"] for point in points if point["is_baseline"]), None)
    told = "; ".join(point["told"] for point in points)
    return {"row": row, "points": points, "x": x.ticks(), "y": y.ticks(), "baseline": baseline, "told": told}


def _place_labels(points: list[dict[str, Any]]) -> None:
    """Give each label a free place beside its point: on the roomier side if it can be, above or below if it must."""
    taken = [_Box(point["x"] - 6, point["x"] + 6, point["y"] - 6, point["y"] + 6) for point in points]
    for point in sorted(points, key=lambda point: point["y"]):
        length = _CHAR_WIDTH * len(point["label"])
        right = point["x"] < (_LEFT + _WIDTH) / 2
        places = [
            (_Box.of_text(point["x"] + (9 if side else -9 - length), point["y"] + shift, length), side)
            for shift in (-7, 15, -20, 28, -33, 41, -46, 54)
            for side in (right, not right)
        ]
        inside = [place for place in places if place[0].is_inside(0, _WIDTH, 0, _HEIGHT - _BOTTOM)] or places
        box, side = next((place for place in inside if not any(place[0].meets(other) for other in taken)), inside[0])
        taken.append(box)
        point |= {"label_y": round(box.bottom - 2, 1), "anchor": "start" if side else "end"}


class _Box(NamedTuple):
    """A rectangle in a plot; y grows downward."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def of_text(cls, left: float, baseline: float, length: float) -> "_Box":
        return cls(left, left + length, baseline - 10, baseline + 2)

    def meets(self, other: "_Box") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_inside(self, left: float, right: float, top: float, bottom: float) -> bool:
        return left <= self.left and self.right <= right and top <= self.top and self.bottom <= bottom


def _layers(report: Report) -> list[dict[str, dict[int, float]]]:
    """For every run: module -> layer -> SQNR in dB, of the matrices that lost something."""
    found: list[dict[str, dict[int, float]]] = []
    for run in report.runs:
        modules: dict[str, dict[int, float]] = {}
        for row in run.results.model.coverage:
            match = _LAYER.search(str(row.get("name", "")))
            level = row.get("sqnr_db")
            if match and isinstance(level, (int, float)) and math.isfinite(level):
                modules.setdefault(match[2], {})[int(match[1])] = float(level)
        found.append(modules)
    return found


def _costs(report: Report) -> list[dict[str, dict[int, float]]]:
    """For every run: linears -> layer -> logarithm of the divergence with them alone in the coarsest scheme."""
    found: list[dict[str, dict[int, float]]] = []
    for run in report.runs:
        modules: dict[str, dict[int, float]] = {}
        for name, cost in run.results.model.sensitivity.items():
            match = _LAYER.search(name)
            if match and cost > 0.0:
                modules.setdefault(match[2].replace(",", ", "), {})[int(match[1])] = math.log10(cost)
        found.append(modules)
    return found


def _layer_plots(layers: Sequence[dict[str, dict[int, float]]], *, is_log: bool = False) -> list[dict[str, Any]]:
    """A plot for each module, all to one scale; of logarithms it is labeled with what they are of."""
    every = [(layer, level) for modules in layers for levels in modules.values() for layer, level in levels.items()]
    if not every:
        return []
    x = _scale([layer for layer, _ in every], _LEFT, _WIDTH - _RIGHT, margin=0.03)
    y = _scale([level for _, level in every], _HEIGHT - _BOTTOM, _TOP)
    y_ticks = _powers(y) if is_log else y.ticks()
    plots: list[dict[str, Any]] = []
    for module in dict.fromkeys(module for modules in layers for module in modules):
        series: list[dict[str, Any]] = []
        for place, modules in enumerate(layers):
            points = [(x(layer), y(level)) for layer, level in sorted(modules.get(module, {}).items())]
            if points:
                series.append({"series": place % 6, "points": points})
        ticks = [tick for tick in x.ticks() if "." not in tick[1]]
        plots.append({"module": module, "series": series, "x": ticks, "y": y_ticks})
    return plots


def _powers(y: _Scale) -> list[tuple[float, str]]:
    """Ticks at 1, 2 and 5 times powers of ten; at the powers alone where those are many."""
    powers = range(math.floor(y.low), math.ceil(y.high) + 1)
    values = [
        (step * 10.0**power, math.log10(step) + power)
        for power in powers
        for step in ((1, 2, 5) if len(powers) < _MANY_POWERS else (1,))
    ]
    return [
        (y(place), f"{value:.0e}".replace("e-0", "e-").replace("e+00", ""))
        for value, place in values
        if y.low <= place <= y.high
    ]


def _training_plot(training: Training) -> dict[str, Any]:
    """Losses against steps; the onset is where fake quantization set in, if that was later than the first step."""
    curves = [_thinned(training.losses), training.held_out, training.held_out_quantized]
    every = [point for curve in curves for point in curve]
    x = _scale([step for step, _ in every], _LEFT, _WIDTH - _RIGHT, margin=0.03)
    y = _scale([loss for _, loss in every], _HEIGHT - _BOTTOM, _TOP)
    series = [
        {"series": place, "points": [(x(step), y(loss)) for step, loss in curve], "marked": place > 0}
        for place, curve in enumerate(curves)
        if curve
    ]
    start = training.fake_quant_from
    onset = x(start) if start is not None and training.losses and start > training.losses[0][0] else None
    ticks = [tick for tick in x.ticks() if "." not in tick[1]]
    told = "; ".join(map(" ".join, zip(text.TRAINING_COLUMNS, text.training_row(training), strict=True)))
    return {"training": training, "series": series, "x": ticks, "y": y.ticks(), "onset": onset, "told": told}


def _thinned(curve: Curve) -> Curve:
    """At most `_MAX_POINTS` points, each the mean of as many neighbours."""
    stride = math.ceil(len(curve) / _MAX_POINTS)
    parts = [curve[start : start + stride] for start in range(0, len(curve), max(stride, 1))]
    return tuple((part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts)


def _worst(report: Report, layers: Sequence[dict[str, dict[int, float]]]) -> list[tuple[str, str, str]]:
    """Run, matrix and dB of the matrices that lost most, run by run."""
    rows: list[tuple[str, str, str]] = []
    for run, modules in zip(report.runs, layers, strict=True):
        ranked = sorted((level, layer, module) for module, levels in modules.items() for layer, level in levels.items())
        rows += [
            (run.label, f"layer {layer}, {module}", f"{level:.1f}") for level, layer, module in ranked[:_NUM_WORST]
        ]
    return rows


def _dearest(report: Report, costs: Sequence[dict[str, dict[int, float]]]) -> list[tuple[str, str, str]]:
    """Run, linears and nats of those that cost most, run by run."""
    rows: list[tuple[str, str, str]] = []
    for run, modules in zip(report.runs, costs, strict=True):
        ranked = sorted(
            ((level, layer, module) for module, levels in modules.items() for layer, level in levels.items()),
            reverse=True,
        )
        rows += [
            (run.label, f"layer {layer}, {module}", f"{10**level:.2g}") for level, layer, module in ranked[:_NUM_WORST]
        ]
    return rows


def _shortened(label: str) -> str:
    return label if len(label) <= _LABEL_CHARS else label[: _LABEL_CHARS - 1] + "…"
