"""A Hugging Face directory: ``config.json`` and safetensors, or plain-tensor pickles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmq.checkpoint.fused import split_experts
from llmq.checkpoint.reader import TensorInfo, read_json
from llmq.checkpoint.safetensors import StoredTensor, read_header
from llmq.errors import CheckpointError
from llmq.model.config import architecture_of

#: Endings of files that hold weights in one format or another: never side files.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_SIDE_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


class HuggingFaceCheckpoint:
    """Reads a directory as `reader.CheckpointReader`.

    The index, where there is one, is the authority: a shard or tensor it names must be there, and
    a tensor it does not name must not.

    Args:
        path: The directory.

    Raises:
        CheckpointError: A file is missing, damaged, or contradicts the index.
    """

    format = "huggingface"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = read_json(path / "config.json")
        self.files: Mapping[str, Path] = weight_files(path)
        if all(name.endswith(".safetensors") for name in self.files):
            self._stored = split_experts(read_stored(path, self.files), architecture_of(self.config))
            self.tensors: Mapping[str, TensorInfo] = {
                name: TensorInfo(t.shape, t.dtype, t.num_bytes, t.path.name) for name, t in self._stored.items()
            }
        else:
            from llmq.checkpoint.pickle import read_pickles

            self._stored = read_pickles(self.files)
            self.tensors = {name: t.info for name, t in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored type; see `reader.CheckpointReader.read`."""
        return self._stored[name].read()

    def side_files(self) -> dict[str, bytes]:
        """Tokenizer, template, generation defaults and licence, byte for byte."""
        return side_files(self.path)


def side_files(path: Path) -> dict[str, bytes]:
    """The small files of a model directory.

    Args:
        path: The directory.

    Returns:
        Name -> contents, without ``config.json``, ``llmq.json`` and anything that holds weights.
    """
    return {
        file.name: file.read_bytes()
        for file in sorted(path.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.name not in ("config.json", "llmq.json")
        and not file.name.endswith(_WEIGHTS)
        and (file.name.endswith(_SIDE_FILES) or file.name.startswith(("LICENSE", "NOTICE")))
    }


def holds_weights(path: Path) -> bool:
    """Whether any file of a directory holds weights, or lists files that do.

    Args:
        path: The directory.

    Returns:
        False for a description alone.
    """
    return any(file.name.endswith(_WEIGHTS) for file in path.iterdir())


def weight_files(path: Path) -> dict[str, Path]:
    """The weight files of a directory, by the index or by their one known name.

    Args:
        path: The directory.

    Returns:
        File name -> path, in the order of the index.

    Raises:
        CheckpointError: There are none, or one the index names is missing.
    """
    for stem, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = path / f"{stem}{ending}.index.json"
        if index.is_file():
            names = list(dict.fromkeys(_weight_map(index).values()))
            for name in names:
                if Path(name).name != name or not (path / name).is_file():
                    raise CheckpointError(
                        f"{path / name}: is missing, although {index.name} lists it; fetch the checkpoint again."
                    )
            return {name: path / name for name in names}
        if (path / f"{stem}{ending}").is_file():
            return {f"{stem}{ending}": path / f"{stem}{ending}"}
    raise CheckpointError(f"{path}: holds no model.safetensors, no pytorch_model.bin and no index of either.")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map.")
    wrong = next((name for name, file in weight_map.items() if not isinstance(file, str) or len(file) > 255), None)
    if wrong is not None:
        raise CheckpointError(f"{index}: weight_map names no file for {wrong}.")
    return weight_map


def read_stored(path: Path, files: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """Place of every tensor in a directory's safetensors files, held against the index.

    Args:
        path: The directory.
        files: Its weight files.

    Returns:
        Tensor name -> place.

    Raises:
        CheckpointError: A file is damaged, or files and index disagree.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files.values():
        tensors, _ = read_header(file)
        twice = next((name for name in tensors if name in stored), None)
        if twice:
            raise CheckpointError(f"{file}: tensor {twice} is in {stored[twice].path.name} as well.")
        stored.update(tensors)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _weight_map(index)
        for name, file_name in weight_map.items():
            if name not in stored or stored[name].path.name != file_name:
                raise CheckpointError(
                    f"{path / file_name}: tensor {name} is missing, although {index.name} lists it there."
                )
        extra = next((name for name in stored if name not in weight_map), None)
        if extra:
            raise CheckpointError(f"{stored[extra].path}: tensor {extra} is not in {index.name}.")
    return stored
