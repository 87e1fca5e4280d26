"""Finished blocks on disk: the writer reads them in the end, and a run that was killed goes on from them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmq.checkpoint import layout
from llmq.checkpoint.layout import Entry
from llmq.checkpoint.loader import logical_names
from llmq.checkpoint.run import PARTIAL, RunDirectory
from llmq.checkpoint.safetensors import read_header, write_file
from llmq.quant import QTensor, pack_int4
from llmq.quantize.blocks import QuantizedBlock

_FILES = re.compile(r"block-\d{5}\.safetensors")


class Journal:
    """Blocks of one run, in a directory.

    Args:
        directory: Beside the output.
        run: Everything that can change a bit of the result, as JSON values.
        resume: Go on from what the directory holds, rather than start anew.

    Raises:
        ConfigError: The directory is of another run, or of something else.
        OutputError: Another process writes there.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any], *, resume: bool) -> None:
        self._held = RunDirectory(directory, run, _FILES, resume=resume)

    def close(self) -> None:
        """Leave the blocks for a later run."""
        self._held.close()

    def add(self, block: QuantizedBlock) -> None:
        """Keep a block; all of it or, if the process dies, nothing.

        Args:
            block: Just finished.
        """
        parts: dict[str, np.ndarray] = {}
        for name, tensor in block.tensors.items():
            if isinstance(tensor, QTensor):
                values = pack_int4(tensor.values) if tensor.num_bits == 4 else tensor.values
                grid = {layout.VALUES: values, layout.SCALE: tensor.scale, layout.ZERO: tensor.zero}
                parts.update({name + suffix: array for suffix, array in grid.items() if array is not None})
            else:
                parts[name] = tensor
        staged = self._held.path / PARTIAL
        write_file(
            staged,
            parts.items(),
            {"errors": json.dumps(dict(block.errors)), "few_tokens": json.dumps(dict(block.few_tokens))},
        )
        staged.replace(self._path(block.index))

    def get(self, index: int) -> QuantizedBlock | None:
        """A block from before.

        Args:
            index: Which layer.

        Returns:
            The block, or None where it is still to do.
        """
        path = self._path(index)
        if not path.is_file():
            return None
        stored, metadata = read_header(path)
        entries: dict[str, Entry] = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
        tensors = {
            name: layout.decode(name, entries, lambda part: stored[part].read())
            if name + layout.VALUES in stored
            else stored[name].read()
            for name in logical_names(stored)
        }
        return QuantizedBlock(index, tensors, json.loads(metadata["errors"]), json.loads(metadata["few_tokens"]))

    def remove(self) -> None:
        """Delete everything: the artifact stands."""
        self._held.remove()

    def _path(self, index: int) -> Path:
        return self._held.path / f"block-{index:05d}.safetensors"
