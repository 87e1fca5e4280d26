"""The torch backend: tinygemm's int4 on CUDA, its CPU twin elsewhere."""

from llmq.backends.gpu.backend import GPUBackend

__all__ = ["GPUBackend"]
