"""Quantized weights in memory: what the converter would have written, without the files."""

from collections.abc import Callable

import numpy as np

from llmq.checkpoint import layout
from llmq.checkpoint.loader import ModelWeights
from llmq.config import AUTO_GROUP_SIZES, KEEP, Granularity, QuantizationConfig, Scheme
from llmq.model.names import Kind, expected_tensors
from llmq.quant import QTensor, quantize

MATRICES = (Kind.LINEAR, Kind.EMBEDDING, Kind.LM_HEAD)


class QuantizedWeights(ModelWeights):
    """The weights of a checkpoint, each matrix quantized when it is asked for.

    A `ModelWeights` in every respect: entries and shapes are those an artifact would have.

    Args:
        weights: A checkpoint that was never quantized.
        config: What to quantize. Either a configuration (its `ignore` and `overrides` are not
            read here), or a function from a tensor's name to its scheme, None to keep it.
    """

    def __init__(self, weights: ModelWeights, config: QuantizationConfig | Callable[[str], Scheme | None]) -> None:
        super().__init__(weights.reader)
        by_config = isinstance(config, QuantizationConfig)
        self.quantization = config if by_config else QuantizationConfig(scheme="int8_per_channel")
        self.schemes: dict[str, Scheme] = {}
        for name, row in expected_tensors(self.config).items():
            if row.kind in MATRICES:
                scheme = _scheme(config, row.kind, row.shape[-1]) if by_config else config(name)
                if scheme is not None:
                    self.schemes[name] = scheme
        for name, scheme in self.schemes.items():
            _, shape = self.entries.pop(name)
            self.entries.update(layout.entries(name, shape, scheme))

    def __getitem__(self, name: str) -> np.ndarray | QTensor:
        if name not in self.schemes:
            return super().__getitem__(name)
        return quantize(self.reader.read(name), self.schemes[name])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as an artifact would store them."""
        sizes = (dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.entries.values())
        return sum(sizes)


def _scheme(config: QuantizationConfig, kind: Kind, num_features: int) -> Scheme | None:
    name = {Kind.EMBEDDING: config.embedding, Kind.LM_HEAD: config.lm_head}.get(kind, config.scheme)
    if name == KEEP:
        return None
    scheme = config.row(name)
    if scheme.granularity is Granularity.PER_CHANNEL:
        return scheme
    group_size = config.group_size or next(size for size in AUTO_GROUP_SIZES if num_features % size == 0)
    return scheme.model_copy(update={"group_size": group_size})
