"""Slots behind `base.InferenceModel`: runs cut into chunks, a few compiled shapes for all lengths."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from llmq.backends.base import Caps, ComputeType, ModelOptions, Scores, State
from llmq.backends.tpu.device import Device
from llmq.backends.tpu.load import ACCELERATOR_LAYOUTS, CPU_LAYOUTS, load_params
from llmq.backends.tpu.model import Place, Wanted, empty_cache, forward
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
            kv_dtype="int8" if options.kv_int8 else dtype,
            num_slots=options.num_slots,
            max_len=options.max_len,
            vocab_size=weights.config.vocab_size,
            kernels=kernels,
        )

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        with jax.default_device(self._device):
            return empty_cache(self._config, self.caps.num_slots, self.caps.max_len, self.caps.kv_dtype)

    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        run = _Rows(tokens, start + np.arange(len(tokens)))
        state, parts = self._run_chunks(state, slot, run, 0, "logits" if want_logits else "cache")
        return state, np.concatenate(parts) if want_logits else None

    def decode(self, state: State, tokens: np.ndarray, positions: np.ndarray) -> tuple[State, np.ndarray]:
        """See `base.InferenceModel.decode`."""
        state, logits = self._run(state, 0, _Rows(tokens[:, None], positions[:, None]), 0, "logits")
        return state, np.asarray(logits)[:, 0]

    def score(
        self, state: State, slot: int, shared: int, runs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> tuple[State, list[Scores]]:
        """See `base.InferenceModel.score`."""
        lengths = [len(run) for run in runs]
        ends = np.cumsum(lengths)
        first = np.repeat(shared + ends - lengths, lengths)
        rows = _Rows(np.concatenate(runs), shared + np.arange(ends[-1]), first, np.concatenate(targets))
        state, parts = self._run_chunks(state, slot, rows, shared, "scores")
        logprobs, greedy = (np.concatenate(column) for column in zip(*parts, strict=True))
        cut = ends[:-1]
        split = zip(np.split(logprobs, cut), np.split(greedy, cut), strict=True)
        return state, [Scores(*part) for part in split]

    def _run_chunks(
        self, state: State, slot: int, rows: "_Rows", shared: int, wanted: Wanted
    ) -> tuple[State, list[Any]]:
        """Run tokens of one slot through the chunk sizes, and cut the padding off what comes back."""
        parts, done = [], 0
        for size, count in chunks(len(rows.tokens)):
            state, out = self._run(state, slot, rows.chunk(done, count, size), shared, wanted)
            parts.append(jax.tree.map(lambda array, count=count: np.asarray(array)[0, :count], out))
            done += count
        return state, parts

    def _run(self, state: State, slot: int, rows: "_Rows", shared: int, wanted: Wanted) -> tuple[State, Any]:
        assert rows.rows.max() < self.caps.max_len, "tokens must be within their slot"
        place = Place(np.int32(slot), rows.rows, rows.first, np.int32(shared))
        return forward(
            self._config, self.caps.dtype, self._params, state, rows.tokens, place, rows.targets, wanted=wanted
        )


class _Rows:
    """Tokens, the rows they go to, where their runs begin and what to score; int32 of one shape."""

    def __init__(self, tokens: np.ndarray, rows: np.ndarray, first: Any = 0, targets: Any = 0) -> None:
        arrays = (np.broadcast_to(np.asarray(array, np.int32), rows.shape) for array in (tokens, rows, first, targets))
        self.tokens, self.rows, self.first, self.targets = arrays

    def chunk(self, start: int, count: int, size: int) -> "_Rows":
        """Some of them as a batch of one, padded to `size`."""

        def cut(array: np.ndarray, padding: int) -> np.ndarray:
            return np.pad(array[start : start + count], (0, size - count), constant_values=padding)[None]

        return _Rows(cut(self.tokens, 0), cut(self.rows, -1), cut(self.first, 0), cut(self.targets, 0))
