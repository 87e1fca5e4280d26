"""The GGUF container: metadata, and where every tensor lies in which format. Read strictly.

A file is a header (metadata, then name, shape, type and offset of every tensor) and aligned
tensor data. The header is parsed here and not by ``gguf.GGUFReader``, which takes seconds over a
vocabulary and does not end on some damaged counts; block formats are decoded by ``gguf.quants``.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llmq.checkpoint.reader import TensorInfo
from llmq.errors import CheckpointError, UnsupportedModelError

T = TypeVar("T", int, float, bool, str)

MAGIC = b"GGUF"
VERSIONS = (2, 3)

#: Code of a scalar type in the header -> struct format, little-endian.
_SCALARS: MappingProxyType[int, str] = MappingProxyType(
    dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
)
_STRING, _ARRAY = 8, 9

#: Formats stored as plain numbers -> dtype.
_PLAIN = MappingProxyType(
    {
        GGMLQuantizationType.F32: np.dtype(np.float32),
        GGMLQuantizationType.F16: np.dtype(np.float16),
        GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    }
)
#: Formats stored as blocks of codes, read as float32.
_BLOCKS = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)

#: Elements of a block tensor decoded at once.
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Metadata:
    """The key-value part of a file's header, read with a check of the type.

    Attributes:
        path: The file, for messages.
        values: Key -> bool, int, float, str, or a list of one of them.
    """

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type[T]) -> T | None:
        """A scalar, or None where the file does not give it.

        Args:
            key: Full name.
            kind: bool, int, float or str; an int passes as float.

        Returns:
            The value.

        Raises:
            CheckpointError: The value has another type.
        """
        value = self.values.get(key)
        if value is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return kind(value)
        raise CheckpointError(f"{self.path}: {key} is a {type(value).__name__}; llmq reads it as one {kind.__name__}.")

    def require(self, key: str, kind: type[T]) -> T:
        """As `get`, for a value that must be there.

        Args:
            key: Full name.
            kind: As for `get`.

        Returns:
            The value.

        Raises:
            CheckpointError: The value is missing or has another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata has no {key}; convert the model to GGUF again.")
        return value

    def array(self, key: str, kind: type[T]) -> list[T] | None:
        """A list, or None where the file does not give it.

        Args:
            key: Full name.
            kind: Type of every element.

        Returns:
            The elements.

        Raises:
            CheckpointError: The value is not a list of `kind`.
        """
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise CheckpointError(f"{self.path}: {key} is not a list of {kind.__name__}.")
        return value


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Where a tensor lies.

    Attributes:
        path: File.
        type: Block format.
        shape: Sizes, slowest first.
        offset: First byte, counted from the start of the file.
    """

    path: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a whole number of blocks."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def info(self) -> TensorInfo:
        """Its description."""
        return TensorInfo(self.shape, _PLAIN.get(self.type, np.dtype(np.float32)), self.num_bytes, self.path.name)

    def read(self) -> np.ndarray:
        """Decode it.

        Returns:
            The tensor, in memory of its own.

        Raises:
            CheckpointError: The file ended early.
        """
        raw = np.fromfile(self.path, np.uint8, self.num_bytes, offset=self.offset)
        if raw.size != self.num_bytes:
            raise CheckpointError(f"{self.path}: ended after {raw.size} of a tensor's {self.num_bytes} bytes.")
        if self.type in _PLAIN:
            return raw.view(_PLAIN[self.type]).reshape(self.shape)
        rows = raw.reshape(-1, self.row_bytes)
        decoded = np.empty((len(rows), self.shape[-1]), np.float32)
        step = max(1, _CHUNK // self.shape[-1])
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale becomes a NaN or inf: seen downstream
            for start in range(0, len(rows), step):
                decoded[start : start + step] = dequantize(rows[start : start + step], self.type)
        return decoded.reshape(self.shape)


def read_header(path: Path) -> tuple[Metadata, dict[str, BlockTensor]]:
    """Read and check the header of a file.

    Args:
        path: A ``.gguf`` file.

    Returns:
        The metadata, and name -> place of every tensor.

    Raises:
        CheckpointError: The file is truncated or damaged, of an unknown version, or a part of several.
        UnsupportedModelError: A tensor is stored in a format llmq does not decode.
    """
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path}: has {size} bytes, less than the header of a GGUF file; it is truncated.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check_version(path, data[:4], int.from_bytes(data[4:8], "little"))
        try:
            cursor = _Cursor(data, 8)
            num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
            values = _unique((cursor.string(), cursor.value()) for _ in range(num_values))
            rows = _unique((cursor.string(), cursor.tensor()) for _ in range(num_tensors))
        except (struct.error, ValueError, OverflowError) as err:
            raise CheckpointError(f"{path}: the header is damaged or truncated ({err}).") from err
    metadata = Metadata(path, values)
    if (metadata.get("split.count", int) or 1) > 1:
        raise CheckpointError(
            f"{path}: is one of {values['split.count']} parts; join them with llama-gguf-split --merge."
        )
    alignment = metadata.get("general.alignment", int)
    alignment = 32 if alignment is None else alignment
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment}, not a power of two; the header is damaged.")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _place(path, name, start, *row) for name, row in rows.items()}
    _check_extents(path, tensors, start, size)
    return metadata, tensors


def _check_version(path: Path, magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise CheckpointError(f"{path}: does not begin with GGUF; it is not a GGUF file.")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(f"{path}: is a big-endian GGUF file; llmq reads little-endian ones.")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path}: is GGUF version {version}; llmq reads versions 2 and 3, so convert the model again."
        )


class _Cursor:
    """Reads the parts of a header in order; running past the end is a ValueError or struct.error."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > len(self._data):
            raise ValueError(f"a text of {length} bytes runs past the end")
        text = self._data[self.position : end]
        self.position = end
        return text.decode()

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(_scalar_code(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        code = f"<{count}{_scalar_code(kind)}"
        end = self.position + count * struct.calcsize("<" + _scalar_code(kind))
        if end > len(self._data):
            raise ValueError(f"a list of {count} numbers runs past the end")
        values = list(struct.unpack_from(code, self._data, self.position))
        self.position = end
        return values

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape slowest first, format code, and offset into the data."""
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"a tensor of {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))
        return shape[::-1], self.scalar("I"), self.scalar("Q")


def _scalar_code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]


def _unique(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} appears twice")
        found[name] = value
    return found


def _place(path: Path, name: str, start: int, shape: tuple[int, ...], code: int, offset: int) -> BlockTensor:
    known = (*_PLAIN, *_BLOCKS)
    if code not in known:
        stored = {kind.value: kind.name for kind in GGMLQuantizationType}.get(code, f"format {code}")
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} is stored as {stored}; llmq decodes {', '.join(t.name for t in known)}."
        )
    tensor = BlockTensor(path, GGMLQuantizationType(code), shape, start + offset)
    block = GGML_QUANT_SIZES[tensor.type][0]
    if min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(shape)}, which {tensor.type.name} blocks of {block} do not fill."
        )
    return tensor


def _check_extents(path: Path, tensors: Mapping[str, BlockTensor], start: int, size: int) -> None:
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps the one before it; the header is damaged.")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise CheckpointError(f"{path}: tensor {name!r} ends at byte {end} of a {size} byte file; it is truncated.")
