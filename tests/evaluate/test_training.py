"""Logs of training runs, and how a report shows them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmq.errors import ConfigError
from llmq.evaluate.report import build_report
from llmq.evaluate.report_html import to_html
from llmq.evaluate.report_markdown import to_markdown
from llmq.evaluate.training import METRICS, Training, read_training
from tests.evaluate.test_report import checked, three


def events(num_steps: int = 4, quantized_from: int = 3) -> list[dict[str, Any]]:
    before = [{"step": 0, "eval_loss": 3.0, "eval_loss_quantized": 3.5}]
    steps = [{"step": n, "loss": 3 - 0.001 * n, "quantized": n >= quantized_from} for n in range(1, num_steps + 1)]
    return [*before, *steps, {"step": num_steps, "eval_loss": 2.0, "eval_loss_quantized": 2.25}]


def write_log(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_course_of_a_run(tmp_path: Path) -> None:
    log = write_log(tmp_path / "out" / METRICS, events())
    found = read_training(log.parent)
    assert found == Training(
        label="out",
        losses=((1, 2.999), (2, 2.998), (3, 2.997), (4, 2.996)),
        held_out=((0, 3.0), (4, 2.0)),
        held_out_quantized=((0, 3.5), (4, 2.25)),
        fake_quant_from=3,
    )
    assert read_training(log) == found
    with log.open("a") as file:
        file.write('{"step": 5, "lo')  # while it goes on
    assert read_training(log) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory); give a directory or a log that llmq qat wrote."),
        ("", "holds no step of llmq qat."),
        ('{"step": 1}\n', "holds no step of llmq qat."),
        ('{"step": 1, "loss": 2}\nx\n', "line 2 is no step of llmq qat; give an undamaged log."),
        ('{"loss": 2}\n', "line 1 is no step of llmq qat; give an undamaged log."),
        ('{"step": 1, "loss": NaN}\n', "line 1 is no step of llmq qat; give an undamaged log."),
        ("[]\n", "line 1 is no step of llmq qat; give an undamaged log."),
    ],
)
def test_what_is_no_log(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / METRICS).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_training(tmp_path)
    assert str(caught.value) == f"{tmp_path / METRICS}: {message}"


def test_a_report_tells_of_training(tmp_path: Path) -> None:
    trainings = [
        read_training(write_log(tmp_path / "delayed" / METRICS, events())),
        read_training(write_log(tmp_path / "<long>" / METRICS, events(1000, 1))),
    ]
    report = build_report(three(), trainings=trainings)
    text = to_markdown(report)
    assert "| delayed | 4 | 3 | 3.0000 → 2.0000 | 3.5000 → 2.2500 |\n" in text
    page = to_html(report)
    checked(page)
    section = page[page.index("<h2>Training</h2>") : page.index("<h2>How to read this</h2>")]
    delayed, long = section.split("<figure>")[1:]
    lines = [points.split() for points in re.findall(r'<polyline class="line s\d[^"]*" points="([^"]*)"', delayed)]
    assert [len(points) for points in lines] == [4, 2, 2]
    (first, last), (quantized, _) = ([tuple(map(float, point.split(","))) for point in points] for points in lines[1:])
    assert first[0] == quantized[0] < last[0]
    assert quantized[1] < first[1] < last[1]  # higher losses stand higher, where y is less
    assert "fake quantization from step 3" in delayed
    assert "fake quantization from step" not in long.split("<table")[0].replace("fake quantization from step 1;", "")
    steps = re.search(r'<polyline class="line s0[^"]*" points="([^"]*)"', long)
    assert steps
    assert len(steps[1].split()) == 250
    assert "&lt;long&gt;" in long


def test_a_report_without_training_does_not_speak_of_it() -> None:
    assert "Training" not in to_markdown(build_report(three())) + to_html(build_report(three()))


def test_training_alone_is_no_report(tmp_path: Path) -> None:
    training = read_training(write_log(tmp_path / "out" / METRICS, events()))
    with pytest.raises(ConfigError, match="runs: hold no result of llmq eval; give one, runs of llmq qat are shown"):
        build_report([], trainings=[training])
