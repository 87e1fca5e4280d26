"""Experts that a checkpoint keeps in one tensor of a layer, read as the matrices of each.

    LAYER.mlp.experts.gate_up_proj    [E, 2 * I, D], the rows of gate above those of up
    LAYER.mlp.experts.down_proj       [E, D, I]

This is how transformers 5 holds them, and how it saves them when told not to restore the names of the family. Every
matrix is contiguous there, so nothing is copied: it is a tensor at an offset.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from llmq.checkpoint.safetensors import StoredTensor
from llmq.model.names import EXPERT_SPELLINGS

_FUSED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")


def split_experts(stored: Mapping[str, StoredTensor], architecture: str) -> dict[str, StoredTensor]:
    """Name every expert's matrices as the family does.

    Args:
        stored: Tensors by name.
        architecture: Key of `llmq.model.config.FAMILIES`.

    Returns:
        The same tensors, fused ones in parts; all as they are where none is fused.
    """
    if architecture not in EXPERT_SPELLINGS or not any(map(_FUSED.fullmatch, stored)):
        return dict(stored)
    module, (gate, up, down) = EXPERT_SPELLINGS[architecture]
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if router := _ROUTER.fullmatch(name):
            found[f"{router[1]}{module}.gate.weight"] = tensor
        elif (fused := _FUSED.fullmatch(name)) and len(tensor.shape) == 3:
            for index, matrix in enumerate(_matrices(tensor)):
                at = f"{fused[1]}{module}.experts.{index}"
                parts = (
                    {down: matrix} if fused[2] == "down_proj" else dict(zip((gate, up), _halves(matrix), strict=True))
                )
                found.update({f"{at}.{part}.weight": each for part, each in parts.items()})
        else:
            found[name] = tensor
    return found


def _matrices(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Along the first axis."""
    step = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    for index in range(tensor.shape[0]):
        yield replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + index * step)


def _halves(matrix: StoredTensor) -> tuple[StoredTensor, StoredTensor]:
    """The first rows, and as many after them or one more."""
    num_rows, num_features = matrix.shape
    first = num_rows // 2
    below = matrix.offset + first * num_features * matrix.dtype.itemsize
    return (
        replace(matrix, shape=(first, num_features)),
        replace(matrix, shape=(num_rows - first, num_features), offset=below),
    )
