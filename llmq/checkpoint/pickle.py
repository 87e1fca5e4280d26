"""``pytorch_model.bin``: pickles of plain tensors, read without running what a pickle can run.

torch is imported here and only when such a file is met: no other library reads the format with
its restricted unpickler.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmq.checkpoint.reader import TensorInfo
from llmq.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor mapped from its file.

    Attributes:
        tensor: The torch tensor; its pages are read when they are touched.
        path: The file.
    """

    tensor: Any
    path: Path

    @property
    def info(self) -> TensorInfo:
        """Its description."""
        name = str(self.tensor.dtype).removeprefix("torch.")
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        return TensorInfo(tuple(self.tensor.shape), dtype, self.tensor.nbytes, self.path.name)

    def read(self) -> np.ndarray:
        """The tensor as NumPy, in memory of its own."""
        import torch

        tensor = self.tensor.contiguous()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return tensor.numpy().copy()


def read_pickles(files: Mapping[str, Path]) -> dict[str, PickledTensor]:
    """Map the tensors of pickled state dicts.

    Args:
        files: File name -> path.

    Returns:
        Tensor name -> tensor.

    Raises:
        CheckpointError: A file is not a state dict of plain tensors.
    """
    import torch

    tensors: dict[str, PickledTensor] = {}
    for path in files.values():
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as err:
            raise CheckpointError(
                f"{path}: is not a pickle of plain tensors, so it is not opened; convert it to safetensors where you trust it."
            ) from err
        if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
            raise CheckpointError(f"{path}: does not hold a state dict of plain tensors.")
        tensors.update({name: PickledTensor(tensor, path) for name, tensor in state.items()})
    return tensors
