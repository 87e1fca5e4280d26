"""A checkpoint that is not there: names, types and shapes, with zeros for weights."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from llmq.checkpoint.layout import Entry, entry_bytes
from llmq.checkpoint.reader import TensorInfo


class Outline:
    """See `reader.CheckpointReader`.

    Args:
        config: Contents of its ``config.json``.
        stored: Stored name -> dtype and shape.
    """

    format = "outline"

    def __init__(self, config: Mapping[str, Any], stored: Mapping[str, Entry]) -> None:
        self.path = Path("outline")
        self.config = config
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(entry[1], entry[0], entry_bytes(entry), "") for name, entry in stored.items()
        }
        self.files: Mapping[str, Path] = MappingProxyType({})

    def read(self, name: str) -> np.ndarray:
        """Zeros, as `tensors` describes them."""
        info = self.tensors[name]
        return np.zeros(info.shape, info.dtype)

    def side_files(self) -> dict[str, bytes]:
        """None."""
        return {}
