"""llmq: from a bfloat16 checkpoint to a quantized model that answers requests.

The names below are imported when they are first used, so that ``import llmq`` costs nothing. Whole
jobs are modules of their own: `llmq.convert`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmq.backends.registry import load_backend, select_backend
    from llmq.checkpoint.inspect import describe
    from llmq.checkpoint.loader import ModelWeights, load_weights
    from llmq.config import SCHEMES, Override, QuantizationConfig, Scheme
    from llmq.engine.generate import Session
    from llmq.engine.sampling import SamplingParams
    from llmq.errors import LlmqError
    from llmq.model.tokenizer import Tokenizer
    from llmq.quant import QTensor, dequantize, fake_quantize, quantize

__all__ = [
    "SCHEMES",
    "LlmqError",
    "ModelWeights",
    "Override",
    "QTensor",
    "QuantizationConfig",
    "SamplingParams",
    "Scheme",
    "Session",
    "Tokenizer",
    "dequantize",
    "describe",
    "fake_quantize",
    "load_backend",
    "load_weights",
    "quantize",
    "select_backend",
]

#: Module -> the public names it defines.
_HOMES = {
    "llmq.backends.registry": ("load_backend", "select_backend"),
    "llmq.checkpoint.inspect": ("describe",),
    "llmq.checkpoint.loader": ("ModelWeights", "load_weights"),
    "llmq.config": ("SCHEMES", "Override", "QuantizationConfig", "Scheme"),
    "llmq.engine.generate": ("Session",),
    "llmq.engine.sampling": ("SamplingParams",),
    "llmq.errors": ("LlmqError",),
    "llmq.model.tokenizer": ("Tokenizer",),
    "llmq.quant": ("QTensor", "dequantize", "fake_quantize", "quantize"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'llmq' has no attribute {name!r}")
    return getattr(import_module(home), name)
