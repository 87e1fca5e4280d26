"""A run's directory: one process at a time, the same run or none, and nothing of anyone else's deleted."""

import fcntl
import os
import re
from pathlib import Path

import pytest

from llmq.checkpoint.hold import hold
from llmq.checkpoint.run import PARTIAL, RUN, RunDirectory
from llmq.errors import ConfigError, OutputError

FILES = re.compile(r"part-\d\.bin")


def open_run(path: Path, run: dict, *, resume: bool) -> RunDirectory:
    return RunDirectory(path, run, FILES, resume=resume)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_a_run_goes_on_only_if_it_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = open_run(path, {"a": 1, "b": [2]}, resume=True)
    assert first.is_new
    (path / "part-1.bin").write_bytes(b"done")
    first.close()
    with pytest.raises(ConfigError, match="the interrupted run had a=1, now it is 2; give the same settings"):
        open_run(path, {"a": 2, "b": [2]}, resume=True)
    again = open_run(path, {"a": 1, "b": [2]}, resume=True)
    assert not again.is_new
    again.close()
    anew = open_run(path, {"a": 2}, resume=False)
    assert anew.is_new
    assert contents(path).keys() == {RUN}
    anew.remove()
    assert not path.exists()


def test_a_directory_has_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = open_run(path, {}, resume=False)
    (path / "part-1.bin").write_bytes(b"done")
    for resume in (False, True):
        with pytest.raises(OutputError, match=rf"^output={path}: another llmq is writing there; wait for it"):
            open_run(path, {}, resume=resume)
    assert (path / "part-1.bin").read_bytes() == b"done"
    first.close()
    open_run(path, {}, resume=True).close()


def test_what_is_held_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before may remove the directory between our opening it and our taking it."""
    path, flock = tmp_path / "run", fcntl.flock

    def removed_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.rename(tmp_path / "gone")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    descriptor = hold(path, path)
    assert os.path.samestat(os.fstat(descriptor), path.stat())
    with pytest.raises(OutputError):
        hold(path, path)
    os.close(descriptor)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "files", [["notes.txt"], ["part-1.bin"], [RUN, "notes.txt"], [RUN, "part-1.bin", "part-1.bin.bak"]]
)
def test_what_is_not_of_a_run_is_refused_and_left_alone(tmp_path: Path, files: list[str], *, resume: bool) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=rf"holds something else, {files[-1]}; move it\.$"):
        open_run(tmp_path, {}, resume=resume)
    assert contents(tmp_path) == before
    os.close(hold(tmp_path, tmp_path))  # and nobody holds it


def test_a_directory_within_is_nobodys_to_delete(tmp_path: Path) -> None:
    open_run(tmp_path, {}, resume=False).close()
    (tmp_path / "part-1.bin").mkdir()
    with pytest.raises(ConfigError, match=r"holds something else, part-1\.bin"):
        open_run(tmp_path, {}, resume=False)


def test_a_kill_while_starting_leaves_nothing_that_bars_the_next(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / PARTIAL).write_bytes(b"{")
    run = open_run(path, {}, resume=True)
    assert run.is_new
    run.remove()
    assert not path.exists()


def test_what_appears_during_a_run_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = open_run(path, {}, resume=False)
    (path / "part-1.bin").write_bytes(b"")
    (path / "notes.txt").write_text("mine")
    run.remove()
    assert contents(path) == {"notes.txt": b"mine"}
