"""The arithmetic of quantization, and nothing else.

Written once against the array API standard; NumPy, torch and JAX run the same lines.
"""

from llmq.quant.affine import dequantize, fake_quantize, quantize
from llmq.quant.cache import fake_quantize_vectors, quantize_vectors
from llmq.quant.packing import pack_int4, unpack_int4
from llmq.quant.qtensor import QTensor

__all__ = [
    "QTensor",
    "dequantize",
    "fake_quantize",
    "fake_quantize_vectors",
    "pack_int4",
    "quantize",
    "quantize_vectors",
    "unpack_int4",
]
