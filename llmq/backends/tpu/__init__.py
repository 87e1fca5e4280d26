"""The JAX backend: TPUs, and the CPU where there is none. Imported only when it is asked for."""

from llmq.backends.tpu.backend import TPUBackend

__all__ = ["TPUBackend"]
