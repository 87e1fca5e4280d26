"""Slots behind `base.InferenceModel`: runs cut into chunks, a few compiled shapes for all lengths."""

from collections.abc import Iterator

import jax
import numpy as np

from llmq.backends.base import Caps, ComputeType, ModelOptions, State
from llmq.backends.tpu.device import Device
from llmq.backends.tpu.load import ACCELERATOR_LAYOUTS, CPU_LAYOUTS, load_params
from llmq.backends.tpu.model import empty_cache, forward
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError

#: Lengths a run is cut into, each compiled once.
CHUNK_SIZES = (16, 64, 256, 1024)


def chunks(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut a run into chunks.

    A chunk is padded only when that at most doubles its tokens, or it is of the smallest size.

    Args:
        num_tokens: Length of the run.

    Yields:
        Pairs of a chunk's size and its tokens; these add up to `num_tokens`.
    """
    while num_tokens > 0:
        size = next((size for size in CHUNK_SIZES if num_tokens <= size <= 2 * num_tokens), None)
        size = size or max((size for size in CHUNK_SIZES if size <= num_tokens), default=CHUNK_SIZES[0])
        yield size, min(size, num_tokens)
        num_tokens -= size


class JaxModel:
    """See `base.InferenceModel`. The state is a `model.Cache`, donated at every call."""

    def __init__(self, weights: ModelWeights, options: ModelOptions, device: Device) -> None:
        """Load a model.

        Args:
            weights: Its weights.
            options: `device` is not read again.
            device: Where to run.

        Raises:
            BackendError: The device cannot compute in `options.dtype`.
        """
        on_cpu = device.platform == "cpu"
        dtype: ComputeType = options.dtype or ("float32" if on_cpu else "bfloat16")
        if on_cpu and dtype == "bfloat16":
            raise BackendError(
                "dtype='bfloat16': JAX has no fast bfloat16 product on the cpu; use float32 or --backend cpu."
            )
        self._config, self._device = weights.config, device
        layouts = CPU_LAYOUTS if on_cpu else ACCELERATOR_LAYOUTS
        self._params, kernels = load_params(weights, layouts, dtype, options.max_len, device)
        self.caps = Caps(
            device=f"{device.device_kind} (JAX {jax.__version__})",
            dtype=dtype,
            num_slots=options.num_slots,
            max_len=options.max_len,
            vocab_size=weights.config.vocab_size,
            kernels=kernels,
        )

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        with jax.default_device(self._device):
            return empty_cache(self._config, self.caps.num_slots, self.caps.max_len, self.caps.dtype)

    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        assert start + len(tokens) <= self.caps.max_len, "a run must end within the slot"
        parts, done = [], 0
        for size, count in chunks(len(tokens)):
            token_BN, position_BN = np.zeros((1, size), np.int32), np.full((1, size), -1, np.int32)
            token_BN[0, :count] = tokens[done : done + count]
            position_BN[0, :count] = np.arange(start + done, start + done + count)
            state, logits = self._run(state, slot, token_BN, position_BN, want_logits)
            if logits is not None:
                parts.append(logits[0, :count])
            done += count
        return state, np.concatenate(parts) if want_logits else None

    def decode(self, state: State, tokens: np.ndarray, positions: np.ndarray) -> tuple[State, np.ndarray]:
        """See `base.InferenceModel.decode`."""
        assert positions.max() < self.caps.max_len, "a token must be within its slot"
        state, logits = self._run(state, 0, tokens[:, None], positions[:, None], want_logits=True)
        assert logits is not None
        return state, logits[:, 0]

    def _run(
        self, state: State, slot: int, token_BN: np.ndarray, position_BN: np.ndarray, want_logits: bool
    ) -> tuple[State, np.ndarray | None]:
        state, logits = forward(
            self._config,
            self.caps.dtype,
            self._params,
            state,
            np.int32(slot),
            token_BN.astype(np.int32),
            position_BN.astype(np.int32),
            want_logits=want_logits,
        )
        return state, None if logits is None else np.asarray(logits)
