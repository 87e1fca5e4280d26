"""Slots behind `base.InferenceModel`: a few compiled shapes for all lengths and all requests."""

from collections.abc import Sequence

import jax
import numpy as np

from llmq.backends.base import Caps, ComputeType, ModelOptions, Run, Scores, State
from llmq.backends.tpu.cache import empty_cache
from llmq.backends.tpu.device import Device
from llmq.backends.tpu.load import ACCELERATOR_LAYOUTS, CPU_LAYOUTS, load_params
from llmq.backends.tpu.model import forward, logits, scores
from llmq.backends.tpu.rows import Rows, chunks, place_runs
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError


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
            chunk_size=64 if on_cpu else 256,
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
        parts = []
        for chunk, count in chunks([Rows.of_run(Run(tokens), start)]):
            state, x_BND = self._write(state, slot, start, chunk)
            if want_logits:
                parts.append(np.asarray(logits(self.caps.dtype, self._params, x_BND))[0, :count])
        return state, np.concatenate(parts) if want_logits else None

    def score(self, state: State, slot: int, shared: int, runs: Sequence[Run]) -> tuple[State, list[Scores | None]]:
        """See `base.InferenceModel.score`."""
        placed = place_runs(runs, shared)
        # The head is as large as several layers: runs without targets go first, and without it.
        unscored = [rows for rows, run in zip(placed, runs, strict=True) if run.targets is None]
        scored = [rows for rows, run in zip(placed, runs, strict=True) if run.targets is not None]
        parts = []
        for chunk, _ in chunks(unscored):
            state, _ = self._write(state, slot, shared, chunk)
        for chunk, count in chunks(scored):
            state, x_BND = self._write(state, slot, shared, chunk)
            out = scores(self.caps.dtype, self._params, x_BND, chunk.target_N[None])
            parts.append([np.asarray(score_BN)[0, :count] for score_BN in out])
        logprobs, is_greedy = (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else ([], [])
        ends = np.cumsum([len(rows.token_N) for rows in scored])[:-1]
        of_run = zip(np.split(logprobs, ends), np.split(is_greedy, ends), strict=True)
        return state, [None if run.targets is None else Scores(*next(of_run)) for run in runs]

    def _write(self, state: State, slot: int, shared: int, chunk: Rows) -> tuple[State, jax.Array]:
        assert chunk.row_N.max() < self.caps.max_len, "tokens must be within their slot"
        return forward(
            self._config, self.caps.dtype, self._params, state, chunk.token_N[None], chunk.place(slot, shared)
        )
