"""Writing an artifact: planned to the byte, streamed tensor by tensor, renamed when it is whole.

The artifact is staged in a hidden directory beside its target. Until the last rename the target
is untouched, so an error, a full disk or a kill leaves nothing half written.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmq.checkpoint.hold import hold
from llmq.checkpoint.layout import FORMAT_VERSION, INDEX, RECORD, Entry, entry_bytes
from llmq.checkpoint.safetensors import encode_header, flush_to_disk, write_array
from llmq.errors import OutputError

#: A shard is closed before it would grow beyond this, unless one tensor alone does.
MAX_SHARD_BYTES = 5_000_000_000


def plan_shards(entries: Mapping[str, Entry], max_bytes: int = MAX_SHARD_BYTES) -> dict[str, dict[str, Entry]]:
    """Distribute tensors over files, in order.

    Args:
        entries: Stored name -> dtype and shape.
        max_bytes: Limit of a file's tensors.

    Returns:
        File name -> its part of `entries`.
    """
    shards: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in entries.items():
        num_bytes = entry_bytes(entry)
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += num_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def index_json(shards: Mapping[str, Mapping[str, Entry]]) -> bytes:
    """The index of a sharded artifact.

    Args:
        shards: As from `plan_shards`.

    Returns:
        The file's contents.
    """
    total = sum(entry_bytes(entry) for shard in shards.values() for entry in shard.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return to_json({"metadata": {"total_size": total}, "weight_map": weight_map})


def to_json(value: Any) -> bytes:
    """A JSON file as llmq writes them: indented, UTF-8, ending in a newline."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def planned_bytes(shards: Mapping[str, Mapping[str, Entry]]) -> int:
    """Size of the weight files and their index, exactly.

    Args:
        shards: As from `plan_shards`.

    Returns:
        Bytes on disk.
    """
    files = sum(
        len(encode_header(shard, _METADATA)) + sum(entry_bytes(entry) for entry in shard.values())
        for shard in shards.values()
    )
    return files + (len(index_json(shards)) if len(shards) > 1 else 0)


_METADATA = {"format": "pt", "llmq_format_version": str(FORMAT_VERSION)}


class ArtifactWriter:
    """Writes into a staging directory; `stage` makes one.

    Args:
        directory: Exists and is empty.
        shards: File name -> stored name -> dtype and shape, as from `plan_shards`.

    Attributes:
        directory: The staging directory.
        files: sha256 of every small file written so far, by name.
    """

    def __init__(self, directory: Path, shards: Mapping[str, Mapping[str, Entry]]) -> None:
        self.directory = directory
        self.files: dict[str, str] = {}
        self._shards = shards
        self._queue = [(file, name) for file, shard in shards.items() for name in shard]
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def write(self, name: str, array: np.ndarray) -> None:
        """Append the next tensor of the plan.

        Args:
            name: Stored name; tensors come in planned order.
            array: Of the planned dtype and shape.
        """
        file_name, expected = self._queue.pop(0)
        assert (name, (array.dtype, array.shape)) == (expected, self._shards[file_name][expected]), name
        if self._file is None:
            self._file = (self.directory / file_name).open("wb")
            self._file.write(encode_header(self._shards[file_name], _METADATA))
        write_array(self._file, array)
        hash_tensor(self._hash, name, array)
        if not self._queue or self._queue[0][0] != file_name:
            flush_to_disk(self._file)
            self._file.close()
            self._file = None

    def finish(self) -> str:
        """Write the index, if there is one.

        Returns:
            sha256 over every stored tensor, see `hash_tensor`.
        """
        assert not self._queue, f"{len(self._queue)} planned tensors were not written"
        if len(self._shards) > 1:
            self.write_file(INDEX, index_json(self._shards))
        return self._hash.hexdigest()

    def write_file(self, name: str, contents: bytes) -> None:
        """Write a small file.

        Args:
            name: Without directories.
            contents: Its bytes.
        """
        with (self.directory / name).open("wb") as file:
            file.write(contents)
            flush_to_disk(file)
        self.files[name] = hashlib.sha256(contents).hexdigest()

    def close(self) -> None:
        """Close what an error left open."""
        if self._file is not None:
            self._file.close()


def hash_tensor(digest: Any, name: str, array: np.ndarray) -> None:
    """Add a stored tensor to a running hash: its name, type, shape and bytes.

    Args:
        digest: A hashlib object.
        name: Stored name.
        array: The tensor.
    """
    digest.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def check_target(target: Path, source: Path, *, force: bool) -> None:
    """Refuse a target that would cost the user something, before any work.

    Args:
        target: Where the artifact should go.
        source: Where it comes from.
        force: Allow replacing an existing directory.

    Raises:
        OutputError: The target is the source or holds it, is a file, exists without `force`, or
            cannot be created.
    """
    place, origin = target.resolve(), source.resolve()
    if place == origin or place in origin.parents:
        raise OutputError(f"output={target}: is the source or contains it; choose another directory.")
    if place.exists() and not place.is_dir():
        raise OutputError(f"output={target}: is a file; choose a directory.")
    if place.exists() and not force:
        raise OutputError(f"output={target}: exists already; choose another directory or add --force to replace it.")
    if place.exists() and any(place.iterdir()) and not is_replaceable(place):
        raise OutputError(
            f"output={target}: is not an artifact of llmq, so --force does not replace it; choose another directory."
        )
    if place == Path.cwd() or place in Path.cwd().parents:
        raise OutputError(f"output={target}: is the working directory or contains it; choose another directory.")
    ancestor = next(parent for parent in place.parents if parent.exists())
    if not ancestor.is_dir():
        raise OutputError(f"output={target}: {ancestor} is not a directory.")


def is_replaceable(directory: Path) -> bool:
    """Whether a directory is an artifact and nothing more: replacing it loses nothing but that.

    Args:
        directory: An existing one.

    Returns:
        True when it holds a record, and no file or directory that is not of an artifact.
    """
    try:
        known = set(json.loads((directory / RECORD).read_bytes())["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return all(
        path.is_file() and (path.name in known or path.name in (RECORD, INDEX) or _SHARD.fullmatch(path.name))
        for path in directory.iterdir()
    )


#: Names that `plan_shards` gives.
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@contextmanager
def stage(target: Path, shards: Mapping[str, Mapping[str, Entry]]) -> Generator[ArtifactWriter]:
    """Write an artifact completely or not at all.

    Args:
        target: Final directory; an existing one is replaced at the end (see `check_target`).
        shards: What will be written.

    Yields:
        The writer.

    Raises:
        OutputError: The disk is full or the directory cannot be written.
    """
    place = target.resolve()
    staging = place.with_name(f".{place.name}.llmq-partial")
    created = _missing_parents(place)
    writer = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(staging, target):
            writer = ArtifactWriter(staging, shards)
            yield writer
            swap(staging, place)
    except BaseException as err:
        if writer:
            writer.close()
            shutil.rmtree(staging, ignore_errors=True)
        for directory in created:
            if directory.is_dir() and not any(directory.iterdir()):
                directory.rmdir()
        if isinstance(err, OSError):
            raise _output_error(err, target, shards) from err
        raise


def _missing_parents(place: Path) -> list[Path]:
    return [parent for parent in place.parents if not parent.exists()]


@contextmanager
def _locked(staging: Path, target: Path) -> Generator[None]:
    """Make the staging directory ours: new, or left by a run that was killed, but not one in use."""
    descriptor = hold(staging, target)
    try:
        for leftover in staging.iterdir():
            leftover.unlink()
        yield
    finally:
        os.close(descriptor)


def swap(staging: Path, place: Path) -> None:
    """Put an artifact in its place; an older one is deleted once the new one stands.

    Args:
        staging: Where it is whole; on the same file system.
        place: Where it goes.
    """
    if not place.exists():
        staging.rename(place)
        return
    old = place.with_name(f".{place.name}.llmq-replaced")
    place.rename(old)
    try:
        staging.rename(place)
    except OSError:
        old.rename(place)
        raise
    shutil.rmtree(old)


def _output_error(err: OSError, target: Path, shards: Mapping[str, Mapping[str, Entry]]) -> OutputError:
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"output={target}: the disk is full; {planned_bytes(shards):,} bytes are needed there, nothing was left behind."
        )
    return OutputError(f"output={target}: cannot be written ({err.strerror or err}); nothing was left behind.")
