"""A checkpoint that is quantized on the way to serving."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from llmq.checkpoint.loader import load_weights
from llmq.checkpoint.reader import Progress, no_progress
from llmq.config import QuantizationConfig
from llmq.errors import ConfigError
from llmq.serve.artifacts import cache_directory, quantized
from tests.tiny import byte_tokenizer_files, write_tiny

INT8 = QuantizationConfig(scheme="int8_per_channel")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_tiny(tmp_path / "model")
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    return str(path)


def convert(model: str, config: QuantizationConfig) -> tuple[Path, bool]:
    """The artifact, and whether it was made now."""
    begun = []

    def progress() -> nullcontext[Progress]:
        begun.append(True)
        return nullcontext(no_progress)

    return quantized(load_weights(model), model, config, progress).reader.path, bool(begun)


def test_it_is_made_once(model: str) -> None:
    first, made = convert(model, INT8)
    assert made
    assert first.parent == cache_directory()
    assert convert(model, INT8) == (first, False)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "config.json"])
def test_another_source_is_another_artifact(model: str, name: str) -> None:
    first, _ = convert(model, INT8)
    path = Path(model) / name
    contents = path.read_bytes()
    changed = (
        contents[:-2] + bytes([contents[-2] ^ 1, contents[-1]]) if name.endswith("safetensors") else contents + b" "
    )
    if name.endswith("json"):
        changed = contents.replace(b"{", b'{"note": 1, ', 1)
    path.write_bytes(changed)
    second, made = convert(model, INT8)
    assert made
    assert second != first


def test_another_configuration_is_another_artifact(model: str) -> None:
    first, _ = convert(model, INT8)
    second, made = convert(model, QuantizationConfig(scheme="int4_blockwise", group_size=32))
    assert made
    assert second != first


def test_an_artifact_stays_and_must_agree(model: str) -> None:
    path, _ = convert(model, QuantizationConfig(scheme="int4_blockwise", group_size=32))
    for config in (QuantizationConfig(scheme="w4a16"), QuantizationConfig(scheme="int4_blockwise", group_size=32)):
        assert convert(str(path), config) == (path, False)
    with pytest.raises(ConfigError, match=r"scheme=int8_per_channel: .* is an artifact with scheme=int4_blockwise"):
        convert(str(path), INT8)
    with pytest.raises(ConfigError, match=r"group_size=64: .* is an artifact with group_size=32"):
        convert(str(path), QuantizationConfig(scheme="int4_blockwise", group_size=64))
    with pytest.raises(ConfigError, match="symmetric=True"):
        convert(str(path), QuantizationConfig(scheme="int4_blockwise", symmetric=True))
