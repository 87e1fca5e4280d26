"""Slots behind `base.InferenceModel`: a few compiled shapes for all lengths and all requests."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from llmq.backends.base import Caps, ComputeType, ModelOptions, Run, Scores, SlotSampling, Stats, StepHandle, StepOut
from llmq.backends.sampling import SlotRules
from llmq.backends.tpu.cache import Cache, copy_slot, empty_cache
from llmq.backends.tpu.device import Device, num_compiles
from llmq.backends.tpu.load import CPU_LAYOUTS, accelerator_layouts, load_params
from llmq.backends.tpu.mesh import check_weights, make_mesh, replicated, shardings, whole
from llmq.backends.tpu.model import decode, forward, logits, scores
from llmq.backends.tpu.rows import CHUNK_SIZES, Rows, chunks, place_runs
from llmq.backends.tpu.slots import (
    Slots,
    empty_slots,
    hand_over,
    log_probabilities,
    request,
    take_likeliest,
    take_sampled,
)
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError
from llmq.model.config import ModelConfig


class State(NamedTuple):
    """What `JaxModel` passes on: arrays on the device, and what the host knows of the slots."""

    cache: Cache
    slots: Slots
    host: SlotRules


class JaxModel:
    """See `base.InferenceModel`."""

    def __init__(self, weights: ModelWeights, options: ModelOptions, devices: Sequence[Device]) -> None:
        """Load a model.

        Args:
            weights: Its weights.
            options: `device` is not read again.
            devices: Where to run: the first ones are taken.

        Raises:
            BackendError: The devices cannot compute in `options.dtype` or with `options.kernel`, or are too few.
            ConfigError: The devices cannot share the weights evenly.
        """
        device = devices[0]
        on_cpu = device.platform == "cpu"
        dtype: ComputeType = options.dtype or ("float32" if on_cpu else "bfloat16")
        if options.compile:
            raise BackendError("compile: the tpu backend compiles everything anyway; leave --compile out.")
        if dtype == "float16":
            raise BackendError(
                "dtype='float16': the tpu backend computes in bfloat16 or float32; use one of them, or --backend gpu."
            )
        if on_cpu and dtype == "bfloat16":
            raise BackendError(
                "dtype='bfloat16': JAX has no fast bfloat16 product on the cpu; use float32 or --backend cpu."
            )
        if options.num_threads is not None:
            raise BackendError(
                f"num_threads={options.num_threads}: XLA takes every core that the process may use; "
                "leave --threads out, or narrow the process with taskset."
            )
        self._config = weights.config
        check_weights(weights, options.tp)
        if options.num_slots % options.dp:
            raise BackendError(f"dp={options.dp}: does not divide the {options.num_slots} slots.")
        mesh = make_mesh(devices, options.dp, options.tp, weights.config.num_kv_heads, options.sp)
        layouts = accelerator_layouts(device, mesh.size, options.kernel)
        if on_cpu and mesh.size == 1:
            layouts = CPU_LAYOUTS
        self._params, kernels = load_params(weights, layouts, dtype, options.max_len, mesh)
        several = f"{mesh.size} x " if mesh.size > 1 else ""
        self.caps = Caps(
            device=f"{several}{device.device_kind} (JAX {jax.__version__})",
            dtype=dtype,
            kv_dtype="int8" if options.kv_int8 else dtype,
            num_slots=options.num_slots,
            max_len=options.max_len,
            chunk_size=64 if on_cpu else 256,
            vocab_size=weights.config.vocab_size,
            kernels=kernels,
        )

        # On its device by name: arrays that JAX may move are other arguments to it, compiled once more.
        empty = partial(_empty, self._config, self.caps, mesh)
        cache, slots = jax.eval_shape(empty)
        specs = cache.specs, replicated(slots)
        self._init = jax.jit(empty, out_shardings=shardings(mesh, specs))
        weights_size = sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(self._params))
        state_size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(self._init)))
        self._num_bytes = weights_size + state_size
        num_words = -(-self.caps.vocab_size // 32)
        self._all_allowed = np.full((options.num_slots, num_words), 0xFFFFFFFF, np.uint32)

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        cache, slots = self._init()
        return State(cache, slots, SlotRules(self.caps.num_slots))

    def warmup(self, state: State) -> State:
        """See `base.InferenceModel.warmup`."""
        longest = min(self.caps.chunk_size, self.caps.max_len)
        for num_tokens in sorted({min(size, longest) for size in CHUNK_SIZES}):
            state, _ = self.extend(state, 0, np.zeros(num_tokens, np.int32), 0, want_logits=True)
        state = self.copy_slot(state, 0, 0, 1)
        idle, uniform = np.zeros(self.caps.num_slots, bool), np.zeros(self.caps.num_slots, np.float32)
        for allowed in (None, self._all_allowed):
            state, handle = self.decode(state, idle, uniform, allowed=allowed, want_logprobs=True)
            self.fetch(handle)
        return self.set_slot(state, 0, np.zeros(1, np.int32), SlotSampling())

    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        parts = []
        for chunk, count in chunks([Rows.of_run(Run(tokens), start)]):
            state, x_BND = self._write(state, slot, start, chunk)
            if want_logits:
                parts.append(whole(logits(self.caps.dtype, self._params, x_BND))[0, :count])
        return state, np.concatenate(parts) if want_logits else None

    def set_slot(self, state: State, slot: int, prompt: np.ndarray, sampling: SlotSampling) -> State:
        """See `base.InferenceModel.set_slot`."""
        state.host.set(slot, sampling)
        new = request(prompt, sampling, self.caps.vocab_size)
        return state._replace(slots=hand_over(state.slots, np.int32(slot), new))

    def copy_slot(self, state: State, source: int, target: int, num_tokens: int) -> State:
        """See `base.InferenceModel.copy_slot`."""
        numbers = (np.int32(number) for number in (source, target, num_tokens))
        return state._replace(cache=copy_slot(state.cache, *numbers))

    def decode(
        self,
        state: State,
        active: np.ndarray,
        uniform: np.ndarray,
        *,
        allowed: np.ndarray | None = None,
        want_logprobs: bool = False,
    ) -> tuple[State, StepHandle]:
        """See `base.InferenceModel.decode`."""
        # Copies: JAX may read arguments after this returns, when they are the caller's again.
        active_S, uniform_S = active.copy(), uniform.copy()
        cache, (following, rules, seen), host = state
        cache, logits_SV = decode(self._config, self.caps.dtype, self._params, cache, *following, active_S)
        if allowed is None and host.all_greedy(active):
            following, token_S = take_likeliest(following, logits_SV, active_S)
        else:
            allowed_SW = (self._all_allowed if allowed is None else allowed).view(np.int32).copy()
            following, seen, token_S = take_sampled(following, rules, seen, logits_SV, active_S, uniform_S, allowed_SW)
        report = log_probabilities(logits_SV, token_S) if want_logprobs else ()
        handle = (token_S, *report)
        for array in handle:
            if array.is_fully_addressable:
                array.copy_to_host_async()
        return State(cache, Slots(following, rules, seen), host), handle

    def fetch(self, handle: StepHandle) -> StepOut:
        """See `base.InferenceModel.fetch`."""
        return StepOut(*(whole(array) for array in handle))

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
            parts.append([whole(score_BN)[0, :count] for score_BN in out])
        logprobs, is_greedy = (np.concatenate(column) for column in zip(*parts, strict=True)) if parts else ([], [])
        ends = np.cumsum([len(rows.token_N) for rows in scored])[:-1]
        of_run = zip(np.split(logprobs, ends), np.split(is_greedy, ends), strict=True)
        return state, [None if run.targets is None else Scores(*next(of_run)) for run in runs]

    def stats(self) -> Stats:
        """See `base.InferenceModel.stats`. Other models of the process count as well."""
        return Stats(num_compiles(), self._num_bytes)

    def close(self) -> None:
        """See `base.InferenceModel.close`."""
        for leaf in jax.tree.leaves(self._params):
            leaf.delete()

    def _write(self, state: State, slot: int, shared: int, chunk: Rows) -> tuple[State, jax.Array]:
        assert chunk.row_N.max() < self.caps.max_len, "tokens must be within their slot"
        place = chunk.place(slot, shared)
        cache, x_BND = forward(self._config, self.caps.dtype, self._params, state.cache, chunk.token_N[None], place)
        return state._replace(cache=cache), x_BND


def _empty(config: ModelConfig, caps: Caps, mesh: Mesh) -> tuple[Cache, Slots]:
    cache = empty_cache(config, caps.num_slots, caps.max_len, caps.kv_dtype, mesh)
    return cache, empty_slots(caps.num_slots, caps.vocab_size)
