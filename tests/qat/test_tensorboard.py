"""Event files hold what the metrics hold; they are read back by their own format: length, checksum, event, checksum."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmq.errors import ConfigError
from llmq.qat.loop import read_metrics
from llmq.qat.output import METRICS
from llmq.qat.tensorboard import TAGS, EventFiles
from tests.qat.test_run import Stop, model, recipe, stop_at, text, trained

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="tensorboardX is not installed")

__all__ = ["model", "text"]  # fixtures


def events_of(path: Path) -> Iterator:
    contents = path.read_bytes()
    while contents:
        (size,) = struct.unpack("<Q", contents[:8])
        yield event_pb2.Event.FromString(contents[12 : 12 + size])
        contents = contents[16 + size :]


def shown(directory: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard shows: a file that begins at a step hides that step and later ones of earlier files."""
    values: dict[tuple[str, int], float] = {}
    for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for event in events_of(path):
            if event.HasField("session_log"):
                values = {key: value for key, value in values.items() if key[1] < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in values
                values[value.tag, event.step] = value.simple_value
    return values


def of_metrics(path: Path) -> dict[tuple[str, int], float]:
    return {
        (tag, event["step"]): np.float32(event[field])
        for event in read_metrics(path)
        for field, tag in TAGS.items()
        if field in event
    }


def test_events_are_the_metrics_also_of_a_resumed_run(model: Path, text: Path, tmp_path: Path) -> None:
    wanted = recipe(model, text, max_steps=6, save_every=2, eval_every=3, baseline=True)
    with EventFiles(tmp_path / "events") as note:

        def until_the_fifth(event: dict) -> None:
            note(event)
            if not event.get("baseline"):
                stop_at(5)(event)

        with pytest.raises(Stop):
            trained(wanted, tmp_path / "out", watch=until_the_fifth)
    with EventFiles(tmp_path / "events") as note:
        trained(wanted, tmp_path / "out", watch=note, resume=True)
    found = shown(tmp_path / "events" / "qat")
    assert found == of_metrics(tmp_path / "out" / METRICS)
    assert {tag for tag, _ in found} == set(TAGS.values())
    assert sorted(step for tag, step in found if tag == "train/loss") == [1, 2, 3, 4, 5, 6]
    assert sorted(step for tag, step in found if tag == "eval/loss_quantized") == [0, 3, 6]
    assert {step for tag, step in shown(tmp_path / "events" / "baseline") if tag == "train/loss"} == {1, 2, 3, 4, 5, 6}


def test_without_the_library_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ConfigError, match=r"tensorboard=.*: needs tensorboardX, .*; install llmq\[qat\], or leave it out"
    ):
        EventFiles(tmp_path / "events")
    assert not list(tmp_path.iterdir())
