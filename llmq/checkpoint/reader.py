"""Reading a checkpoint: one protocol over every format, chosen by content.

A reader gives the model's description, the place and type of every tensor, single tensors on
demand, and the small files that make the model usable (tokenizer, chat template, generation
defaults). Nothing here holds more than the tensor it was asked for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmq.errors import AlreadyQuantizedError, CheckpointError

#: Called with the tensor at hand, the bytes done and the bytes in all.
Progress = Callable[[str, int, int], None]


def no_progress(_name: str, _done: int, _total: int) -> None:
    """A `Progress` that tells nobody."""


#: What llmq writes into ``quantization_config["quant_method"]``.
QUANT_METHOD = "llmq"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the checkpoint stores it.

    Attributes:
        shape: Sizes.
        dtype: Type that `CheckpointReader.read` returns.
        num_bytes: Bytes it takes in the source.
        file: Name of the file it lies in.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    num_bytes: int
    file: str


class CheckpointReader(Protocol):
    """A checkpoint of any format, under Hugging Face's tensor names.

    Attributes:
        path: The directory or file.
        format: What it turned out to be.
        config: Contents of ``config.json``, read or rebuilt.
        tensors: Name -> description of every stored tensor.
        files: The weight files, by name.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, Path]

    def read(self, name: str) -> np.ndarray:
        """One tensor, as `tensors` describes it.

        Args:
            name: A key of `tensors`.

        Returns:
            An array in memory of its own.

        Raises:
            CheckpointError: Its bytes cannot be read.
        """
        ...

    def side_files(self) -> dict[str, bytes]:
        """The files to carry along, by name: everything that is not config or weights."""
        ...


def resolve_model(model: str) -> Path:
    """The local place of MODEL: a path, or a hub id fetched through the hub's cache.

    Args:
        model: A directory, a file, or ``organization/name``.

    Returns:
        An existing path.

    Raises:
        CheckpointError: There is no such path and the hub cannot give it.
    """
    if path := _local(model):
        return path
    return _from_hub(model, ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "LICENSE*"])


def find_config(model: str) -> Path | None:
    """The ``config.json`` of MODEL; of a hub id nothing else is fetched.

    Args:
        model: As for `resolve_model`.

    Returns:
        The file; None where there is none, as for a .gguf file.

    Raises:
        CheckpointError: There is no such path and the hub cannot give it.
    """
    file = (_local(model) or _from_hub(model, ["config.json"])) / "config.json"
    return file if file.is_file() else None


def _local(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as err:  # no such user, too long, a NUL byte
        raise CheckpointError(
            f"{model[:200]}: is not a usable path ({getattr(err, 'strerror', None) or err})."
        ) from err


def _from_hub(model: str, patterns: list[str]) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"{model}: no such file or directory; give a model's directory, a .gguf file, or a hub id like organization/name."
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as err:
        reason = str(err).strip().splitlines()[0].rstrip(".")
        raise CheckpointError(f"{model}: neither a local path nor to be had from the hub ({reason}).") from err


def open_checkpoint(model: str) -> CheckpointReader:
    """Open a checkpoint by what it contains.

    Args:
        model: A local path or a hub id.

    Returns:
        The reader for its format.

    Raises:
        CheckpointError: Nothing readable is there, or it is damaged.
        AlreadyQuantizedError: It carries codes of another quantizer.
    """
    path = resolve_model(model)
    file = _gguf_file(path)
    if file is not None:
        from llmq.checkpoint.gguf import GGUFCheckpoint

        return GGUFCheckpoint(file)
    if path.is_dir() and (path / "config.json").is_file():
        from llmq.checkpoint.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    if path.is_dir():
        raise CheckpointError(
            f"{path}: holds neither a config.json nor a single .gguf file; it is not a checkpoint llmq can read."
        )
    raise CheckpointError(f"{path}: is not a .gguf file; give the directory that holds the model's config.json.")


def _gguf_file(path: Path) -> Path | None:
    candidates = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else [path]
    if len(candidates) > 1:
        raise CheckpointError(f"{path}: holds {len(candidates)} .gguf files; name one of them.")
    if not candidates or not candidates[0].is_file():
        return None
    with candidates[0].open("rb") as file:
        return candidates[0] if file.read(4) == b"GGUF" else None


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        path: The file.

    Returns:
        Its contents.

    Raises:
        CheckpointError: It is missing, or not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as err:
        raise CheckpointError(f"{path}: is missing.") from err
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{path}: is not valid JSON ({err}).") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object.")
    return value


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a ``config.json`` says the weights are quantized.

    Args:
        config: The parsed file.

    Returns:
        Its ``quantization_config``; empty when there is none.

    Raises:
        CheckpointError: It is not an object.
    """
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"config.json: quantization_config={quantization!r}: must be an object.")
    return quantization


#: Types of weights that are not codes.
FLOATS = ("bfloat16", "float16", "float32")


def refuse_quantized(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """Refuse a source whose weights are already codes; casting them would be silent nonsense.

    Args:
        config: Its ``config.json``.
        tensors: Its tensors.
        path: For the message.

    Raises:
        AlreadyQuantizedError: The config names a quantizer, or a weight has a code's type.
        CheckpointError: A tensor has a type llmq does not read.
    """
    quantization = quantization_of(config)
    way_out = "give the unquantized bfloat16, float16 or float32 checkpoint instead"
    if quantization:
        method = quantization.get("quant_method", "unnamed")
        raise AlreadyQuantizedError(f"{path}: is already quantized with {method}; {way_out}.")
    for name, info in tensors.items():
        if info.dtype.itemsize == 1 and name.endswith(".weight"):
            raise AlreadyQuantizedError(
                f"{path}: tensor {name} is stored as {info.dtype.name}, so it is already quantized; {way_out}."
            )
        if info.dtype.name not in FLOATS:
            raise CheckpointError(
                f"{path}: tensor {name} is stored as {info.dtype.name}; llmq reads {', '.join(FLOATS)}."
            )
