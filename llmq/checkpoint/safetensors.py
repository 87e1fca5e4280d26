"""The safetensors file format, read strictly and written as a stream.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes. The
safetensors library checks and writes the same format; it is not used here for two reasons: it
writes a file from tensors that are all in memory at once, and its errors do not name the file.
The tests hold every file written here against it.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from llmq.errors import CheckpointError

#: Name in a header -> NumPy dtype.
DTYPES: MappingProxyType[str, np.dtype[Any]] = MappingProxyType(
    {
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F16": np.dtype(np.float16),
        "F32": np.dtype(np.float32),
        "F64": np.dtype(np.float64),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "I8": np.dtype(np.int8),
        "U8": np.dtype(np.uint8),
        "I16": np.dtype(np.int16),
        "U16": np.dtype(np.uint16),
        "I32": np.dtype(np.int32),
        "U32": np.dtype(np.uint32),
        "I64": np.dtype(np.int64),
        "U64": np.dtype(np.uint64),
        "BOOL": np.dtype(np.bool_),
    }
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: Longer headers are refused: a hostile length must not become an allocation.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        path: File.
        dtype: NumPy dtype of its elements.
        shape: Sizes.
        offset: First byte, counted from the start of the file.
    """

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def read(self) -> np.ndarray:
        """The tensor.

        Returns:
            An array in memory of its own.

        Raises:
            CheckpointError: The file ended early.
        """
        array = np.empty(self.shape, self.dtype)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            got = file.readinto(array.reshape(-1).view(np.uint8).data)
        if got != self.num_bytes:
            raise CheckpointError(f"{self.path}: ended after {got} of a tensor's {self.num_bytes} bytes.")
        return array


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read and check the header of a file.

    Args:
        path: A ``.safetensors`` file.

    Returns:
        Name -> place of every tensor, and the file's metadata.

    Raises:
        CheckpointError: The file is truncated, or its header is not one of safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: the header claims {length} bytes of a {size} byte file; it is truncated or not safetensors."
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", {})
        tensors = {name: _stored(path, row, 8 + length) for name, row in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise CheckpointError(f"{path}: the header is not one of a safetensors file ({err}).") from err
    _check_contiguous(path, tensors, 8 + length, size)
    return tensors, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _stored(path: Path, row: Mapping[str, Any], start: int) -> StoredTensor:
    if row["dtype"] not in DTYPES:
        raise ValueError(f"unknown dtype {row['dtype']!r}")
    shape = tuple(row["shape"])
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shape}")
    begin, end = row["data_offsets"]
    tensor = StoredTensor(path, DTYPES[row["dtype"]], shape, start + begin)
    if end - begin != tensor.num_bytes:
        raise ValueError(f"shape {list(shape)} does not fill {end - begin} bytes")
    return tensor


def _check_contiguous(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{path}: tensor {name} overlaps another or leaves a hole.")
        end += tensor.num_bytes
    if end != size:
        raise CheckpointError(
            f"{path}: the header accounts for {end} bytes, the file has {size}; it is truncated or damaged."
        )


def encode_header(entries: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the tensors, padded so that the first tensor is aligned to 8.

    Args:
        entries: Name -> dtype and shape, in file order.
        metadata: Text to carry along.

    Returns:
        Length prefix and JSON header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in entries.items():
        end = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_array(file: BinaryIO, array: np.ndarray) -> None:
    """Append a tensor's bytes.

    Args:
        file: Open for writing.
        array: Any dtype of `DTYPES`, little-endian.
    """
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def flush_to_disk(file: BinaryIO) -> None:
    """Make written bytes survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def write_file(path: Path, arrays: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]) -> None:
    """Write a small file from arrays in memory.

    Args:
        path: Created or replaced.
        arrays: Names and tensors, in file order.
        metadata: Text to carry along.
    """
    arrays = list(arrays)
    with path.open("wb") as file:
        file.write(encode_header({name: (a.dtype, a.shape) for name, a in arrays}, metadata))
        for _, array in arrays:
            write_array(file, array)
