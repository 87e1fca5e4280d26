"""Our files against the safetensors library, and damaged ones against a sentence."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from llmq.checkpoint.safetensors import read_header, write_file
from llmq.errors import CheckpointError

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.scale": np.arange(4).astype(ml_dtypes.bfloat16),
    "c.values": np.arange(8, dtype=np.uint8).reshape(2, 4),
    "d": np.zeros((0, 3), np.int8),
    "e": np.array(1.5, np.float16),
}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, ARRAYS.items(), {"format": "pt"})
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(ARRAYS)
        for name, array in ARRAYS.items():
            got = file.get_tensor(name)
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(got, array)


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(ARRAYS, path, {"key": "value"})
    tensors, metadata = read_header(path)
    assert metadata == {"key": "value"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(tensors[name].read(), array)


def header(rows: object, length: int | None = None, data: bytes = b"\0" * 8) -> bytes:
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def row(**changes: object) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "truncated or not safetensors"),
        (b"\x05\0\0", "truncated or not safetensors"),
        (header({}, length=1 << 60), "truncated or not safetensors"),
        (header(b"{not json"), "not one of a safetensors file"),
        (header([1, 2]), "not one of a safetensors file"),
        (header(b"[" * 100_000), "not one of a safetensors file"),
        (header({"a": {"dtype": "F32"}}), "not one of a safetensors file"),
        (header(row(dtype="F33")), "unknown dtype 'F33'"),
        (header(row(shape=[-2])), "shape"),
        (header(row(shape=[2.0])), "shape"),
        (header(row(shape=[3])), "does not fill 8 bytes"),
        (header(row(shape=[1 << 62, 1 << 62])), "does not fill"),
        (header(row(data_offsets=[8, 16])), "overlaps another or leaves a hole"),
        (header(row(), data=b"\0" * 7), "truncated or damaged"),
        (header(row(), data=b"\0" * 9), "truncated or damaged"),
        (header({**row(), "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, data=b"\0" * 12), "overlaps"),
    ],
)
def test_damaged_files_are_refused_by_name(contents: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_ends_in_another_exception(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write_file(path, ARRAYS.items(), {})
    contents = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, min(400, len(contents) - 1)))] = data.draw(st.integers(0, 255))
    path.write_bytes(contents[: data.draw(st.integers(0, len(contents)))])
    try:
        tensors, _ = read_header(path)
    except CheckpointError:
        return
    for tensor in tensors.values():
        tensor.read()
