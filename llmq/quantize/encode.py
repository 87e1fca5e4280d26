"""What is stored of a tensor: codes from a search, or from the blocks of a calibrated run."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmq.checkpoint.coverage import TensorPlan
from llmq.convert import Encoder, round_to_nearest
from llmq.model.names import Kind, layer_prefix
from llmq.quant import QTensor
from llmq.quant.rows import PackedMatrix, finite, pack_matrix
from llmq.quant.search import on_grid, search_grid
from llmq.quantize.blocks import QuantizedBlock
from llmq.quantize.journal import Journal


def searched(method: str) -> Encoder:
    """Codes of linears on a grid that is searched for, without data.

    Args:
        method: See `search_grid`.

    Returns:
        The encoder; other tensors are rounded to nearest.
    """

    def encode(row: TensorPlan, tensor: np.ndarray, workers: ThreadPoolExecutor) -> PackedMatrix | np.ndarray:
        if row.kind is not Kind.LINEAR or row.scheme is None:
            return round_to_nearest(row, tensor, workers)
        weight_OI = finite(tensor)
        return pack_matrix(
            weight_OI, on_grid(weight_OI, *search_grid(weight_OI, row.scheme, method, workers), row.scheme)
        )

    return encode


def from_journal(journal: Journal) -> Encoder:
    """Codes that were chosen before; a block's file is read once.

    Args:
        journal: Holds every block.

    Returns:
        The encoder; what no block holds is rounded to nearest.
    """
    at: dict[int, QuantizedBlock] = {}

    def encode(row: TensorPlan, tensor: np.ndarray, workers: ThreadPoolExecutor) -> PackedMatrix | np.ndarray:
        found = None
        if row.name.startswith("model.layers."):
            index = int(row.name.split(".")[2])
            if index not in at:
                at.clear()
                block = journal.get(index)
                assert block is not None, f"block {index} is not finished"
                at[index] = block
            found = at[index].tensors.get(row.name.removeprefix(layer_prefix(index)))
        if found is None:
            return round_to_nearest(row, tensor, workers)
        return pack_matrix(tensor.astype(np.float32), found) if isinstance(found, QTensor) else found

    return encode
