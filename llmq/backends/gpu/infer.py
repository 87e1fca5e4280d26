"""`base.InferenceModel` in torch."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmq.backends.base import Caps, ModelOptions, Run, Scores, SlotSampling, State, Stats, StepHandle, StepOut
from llmq.backends.gpu.attention import Cache, RunPlace, StepPlace, send
from llmq.backends.gpu.device import DTYPES, choose_device, release_freed_memory
from llmq.backends.gpu.model import Decoder
from llmq.backends.gpu.parallel import ShardedWeights, join_team
from llmq.backends.gpu.rows import chunks_per_run, row_counts
from llmq.backends.gpu.threads import Threads, choose_threads, use
from llmq.backends.sampling import (
    Rules,
    Seen,
    SlotRules,
    bias_row,
    greedy,
    log_probabilities,
    prompt_row,
    sample,
)
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError

#: Tokens of a chunk of a prompt, by type of device.
_CHUNK_SIZES = {"cpu": 128, "cuda": 256}

#: Chunks written at once, where that changes no bit: weights are dequantized once for all of them.
_CHUNKS_PER_RUN = {"cpu": 4, "cuda": 1}

#: Rows of logits held at once while scoring: 50 MB for a vocabulary of 49,152.
_HEAD_ROWS = 256


class Slots:
    """What a model holds of its slots.

    Args:
        cache: Keys and values.
        num_slots: S.
        vocab_size: V.

    Attributes:
        cache: Keys and values.
        next_S: int64, the token that each slot writes next; on the device.
        positions_S: Where it goes; on the host, which counts along.
        rules: How tokens are chosen; on the host.
        seen: Tokens of each slot; on the device.
        bias_SV: float32, on the device.
        poisoned: Slots that hold something that is not finite.
    """

    def __init__(self, cache: Cache, num_slots: int, vocab_size: int) -> None:
        shape, device = (num_slots, vocab_size), cache.device
        self.cache = cache
        self.next_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.positions_S = np.zeros(num_slots, np.int64)
        self.rules = SlotRules(num_slots)
        self.seen = Seen(
            torch.zeros(shape, dtype=torch.bool, device=device), torch.zeros(shape, dtype=torch.int32, device=device)
        )
        self.bias_SV = torch.zeros(shape, device=device)
        self.poisoned: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.cache.num_bytes + sum(part.nbytes for part in (*self.seen, self.bias_SV, self.next_S))


@dataclass(frozen=True, slots=True)
class Pending:
    """A dispatched step: `StepOut` of the active slots, on its way to the host.

    Attributes:
        slots: Which ones.
        columns: Tokens, and log-probabilities if wanted.
        done: Set when they have arrived; None where nothing needs waiting for.
        poisoned: Gets the slots without a token.
    """

    slots: np.ndarray
    columns: tuple[Tensor, ...]
    done: torch.cuda.Event | None
    poisoned: set[int]


class TorchModel:
    """A decoder with its weights on a device; see `base.InferenceModel` for the methods.

    Args:
        weights: Read one by one.
        options: How.

    Attributes:
        caps: What it is.
        team: The processes that share it; None where it is this one's alone.

    Raises:
        BackendError: A device is not there, as many processes as `tp`, a compiler, or a kernel of another backend.
        ConfigError: The processes cannot share the weights evenly.
    """

    def __init__(self, weights: ModelWeights, options: ModelOptions) -> None:
        if options.kernel is not None:
            raise BackendError(
                f"kernel={options.kernel!r}: is a kernel for TPUs; leave --kernel out, or use --backend tpu where there is one."
            )
        self._device, dtype = choose_device(options)
        self._dtype = DTYPES[dtype]
        self.team = join_team(options, self._device)
        part = ShardedWeights(weights, self.team) if self.team else weights
        self._decoder = Decoder(part, options.max_len, self._device, self._dtype, self.team)
        self._steps = self._decoder
        if options.compile:
            from llmq.backends.gpu.compiled import CompiledDecoder  # with the compiler, 40 MB

            self._steps = CompiledDecoder(self._decoder)
        with self.team.alone() if self.team else nullcontext():
            self._row_counts = row_counts(self._steps, options.num_slots)
        if self.team:
            self._row_counts = self.team.tell(self._row_counts)
        self._num_bytes = self._decoder.num_bytes
        chunk_size = _CHUNK_SIZES[self._device.type]
        most = min(_CHUNKS_PER_RUN[self._device.type], -(-options.max_len // chunk_size))
        num_chunks = 1 if self.team else chunks_per_run(self._decoder, chunk_size, most)
        longest = min(num_chunks * chunk_size, options.max_len)
        self._threads = self._choose_threads(options, chunk_size, longest) if self._device.type == "cpu" else None
        release_freed_memory()  # of what was tried
        several = f"{self.team.size} x " if self.team else ""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        self.caps = Caps(
            device=f"{several}{name}, torch {torch.__version__}",
            dtype=dtype,
            kv_dtype="int8" if options.kv_int8 else dtype,
            num_slots=options.num_slots,
            max_len=options.max_len,
            chunk_size=chunk_size,
            chunks_per_run=num_chunks,
            vocab_size=weights.config.vocab_size,
            kernels=(*self._decoder.kernels(), *([str(self._threads)] if self._threads else [])),
        )

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        stored = torch.int8 if self.caps.kv_dtype == "int8" else self._dtype
        config, caps = self._decoder.config, self.caps
        cache = Cache(config, caps.num_slots, caps.max_len, self._device, stored, self._dtype)
        state = Slots(cache, caps.num_slots, caps.vocab_size)
        self._num_bytes = self._decoder.num_bytes + state.num_bytes
        return state

    def warmup(self, state: State) -> State:
        """See `base.InferenceModel.warmup`. Compiling is over when a model is open; here every kernel is called once."""
        for slot in range(self.caps.num_slots):
            state.cache.clear(slot, 0)
        num_tokens = min(self.caps.chunk_size * self.caps.chunks_per_run, self.caps.max_len)
        prompt = np.zeros(num_tokens, np.int32)
        state, _ = self.extend(state, 0, prompt, 0)
        rules = SlotSampling(temperature=1.0, top_k=1, top_p=0.5, min_p=0.5, presence_penalty=1.0, logit_bias={0: 1.0})
        only = np.arange(self.caps.num_slots) == 0
        for params in (rules, SlotSampling()):
            state = self.set_slot(state, 0, prompt, params)
            state, handle = self.decode(state, only, np.zeros(len(only), np.float32), want_logprobs=True)
            self.fetch(handle)
        return state

    @torch.inference_mode()
    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        owner_M = np.zeros(len(tokens), np.int64)
        positions_M = start + np.arange(len(tokens))
        chunk = self.caps.chunk_size
        run = self._run(state, slot, tokens, start, positions_M, owner_M, owner_M, chunk)
        if not want_logits:
            self._decoder.write(*run)
            return state, None
        return state, self._decoder.logits(self._decoder.forward(*run), chunk).cpu().numpy()

    @torch.inference_mode()
    def set_slot(self, state: State, slot: int, prompt: np.ndarray, sampling: SlotSampling) -> State:
        """See `base.InferenceModel.set_slot`."""
        self._cleanse(state, slot, len(prompt) - 1)
        state.positions_S[slot] = len(prompt) - 1
        state.next_S[slot] = int(prompt[-1])
        state.rules.set(slot, sampling)
        state.seen.prompt_SV[slot] = send(prompt_row(prompt, self.caps.vocab_size), self._device)
        state.seen.answer_SV[slot] = 0
        state.bias_SV[slot] = send(bias_row(sampling, self.caps.vocab_size), self._device)
        return state

    @torch.inference_mode()
    def copy_slot(self, state: State, source: int, target: int, num_tokens: int) -> State:
        """See `base.InferenceModel.copy_slot`."""
        self._cleanse(state, target, 0)
        state.cache.copy(source, target, num_tokens)
        return state

    @torch.inference_mode()
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
        slots = np.flatnonzero(active)
        if len(slots) == 0:
            return state, Pending(slots, (torch.zeros(0),), None, state.poisoned)
        if self._threads is not None:
            use(self._threads.one if len(slots) == 1 else self._threads.more)
        padded = np.pad(slots, (0, self._row_counts[len(slots)] - len(slots)), mode="edge")
        slots_M = send(padded, self._device)
        place = StepPlace(state.cache, slots, state.positions_S[slots])
        x_MD = self._steps.forward(state.next_S[slots_M], send(state.positions_S[padded], self._device), place)
        logits_MV = self._decoder.logits(x_MD)
        tokens_M = self._sample(state, logits_MV, active, padded, uniform, allowed)

        slots_B, tokens_B = slots_M[: len(slots)], tokens_M[: len(slots)]
        state.next_S[slots_B] = tokens_B.clamp(min=0).long()
        state.positions_S[slots] += 1
        columns = (tokens_M, *log_probabilities(logits_MV, tokens_M)) if want_logprobs else (tokens_M,)
        arriving, done = self._receive(tuple(column[: len(slots)] for column in columns))
        return state, Pending(slots, arriving, done, state.poisoned)

    def fetch(self, handle: StepHandle) -> StepOut:
        """See `base.InferenceModel.fetch`."""
        if handle.done is not None:
            handle.done.synchronize()
        columns = [column.numpy() for column in handle.columns]
        handle.poisoned.update(handle.slots[columns[0] < 0].tolist())
        outs = [np.zeros((self.caps.num_slots, *column.shape[1:]), column.dtype) for column in columns]
        for out, column in zip(outs, columns, strict=True):
            out[handle.slots] = column
        return StepOut(*outs)

    @torch.inference_mode()
    def score(self, state: State, slot: int, shared: int, runs: Sequence[Run]) -> tuple[State, list[Scores | None]]:
        """See `base.InferenceModel.score`."""
        lengths = [len(run.tokens) for run in runs]
        starts = [shared + (0 if run.parent is None else lengths[run.parent]) for run in runs]
        parents = [index if run.parent is None else run.parent for index, run in enumerate(runs)]
        positions_M = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
        owner_M, parent_M = np.repeat(np.arange(len(runs)), lengths), np.repeat(parents, lengths)
        tokens = np.concatenate([run.tokens for run in runs])
        run = self._run(state, slot, tokens, shared, positions_M, owner_M, parent_M, len(tokens))

        wanted = [run.targets for run in runs if run.targets is not None]
        if not wanted:
            self._decoder.write(*run)
            return state, [None] * len(runs)
        x_MD = self._decoder.forward(*run)
        scored = np.flatnonzero(np.repeat([run.targets is not None for run in runs], lengths))
        rows = zip(
            x_MD[self._ids(scored)].split(_HEAD_ROWS), self._ids(np.concatenate(wanted)).split(_HEAD_ROWS), strict=True
        )
        logprobs, is_greedy = (
            torch.cat(part).cpu().numpy() for part in zip(*(self._score(*r) for r in rows), strict=True)
        )
        cut = np.cumsum([len(targets) for targets in wanted])[:-1].tolist()
        scores = map(Scores, np.split(logprobs, cut), np.split(is_greedy, cut))
        return state, [None if run.targets is None else next(scores) for run in runs]

    def stats(self) -> Stats:
        """See `base.InferenceModel.stats`."""
        return Stats(num_compiles=self._steps.num_compiles, num_bytes=self._num_bytes)

    def close(self) -> None:
        """See `base.InferenceModel.close`."""
        del self._decoder, self._steps
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(
        self,
        state: State,
        slot: int,
        tokens: np.ndarray,
        start: int,
        positions: np.ndarray,
        owner: np.ndarray,
        parent: np.ndarray,
        chunk: int,
    ) -> tuple[Tensor, Tensor, RunPlace]:
        """What a decoder takes of tokens of one slot; each sees the rows before `start`, its owner's and its parent's."""
        if self._threads is not None:
            use(self._threads.run)
        self._cleanse(state, slot, start)
        positions_M, owner_M, parent_M = map(self._ids, (positions, owner, parent))
        rows_T = torch.arange(start + len(tokens), device=self._device)
        owner_T = torch.cat([torch.full((start,), -1, device=self._device), owner_M])
        visible_MT = (owner_T == -1) | (owner_T == owner_M[:, None]) | (owner_T == parent_M[:, None])
        visible_MT &= rows_T <= rows_T[start:, None]
        positions_T = torch.cat([rows_T[:start], positions_M])
        visibles_MT = [
            visible_MT if window is None else visible_MT & (positions_M[:, None] - positions_T < window)
            for window in state.cache.windows
        ]
        least = np.minimum.accumulate(parent[::-1])[
            ::-1
        ]  # a family begins where nothing behind continues what is before
        begins = np.flatnonzero((np.diff(owner, prepend=-1) > 0) & (least == owner)) if start == 0 else [0]
        size, parts = self.caps.chunk_size, []
        for begin, end in itertools.pairwise([*begins, len(tokens)]):
            edges = [begin, *range(begin + size - start % size, end, size), end]
            first = 0 if start else begin
            parts += [(slice(a, b), slice(first, start + b)) for a, b in itertools.pairwise(edges)]
        place = RunPlace(state.cache, slot, start, visibles_MT, parts, chunk)
        return self._ids(tokens), positions_M, place

    def _score(self, x_MD: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = self._decoder.logits(x_MD, len(x_MD))
        chosen_M = logits_MV.gather(1, targets_M[:, None])[:, 0]
        return chosen_M - logits_MV.logsumexp(dim=-1), logits_MV.argmax(dim=-1) == targets_M

    def _sample(
        self,
        state: State,
        logits_MV: Tensor,
        active: np.ndarray,
        slots: np.ndarray,
        uniform: np.ndarray,
        allowed: np.ndarray | None,
    ) -> Tensor:
        """Tokens of some slots, the active ones first; counts them where a rule may ask for that."""
        if allowed is None and state.rules.all_greedy(active):
            return greedy(logits_MV)

        def rows(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else send(array[slots], self._device)

        slots_M = self._ids(slots)
        rules = Rules(*map(rows, state.rules.rules(active)))
        if state.rules.has_bias(active):
            rules = rules._replace(bias_SV=state.bias_SV[slots_M])
        seen = None if rules.repetition_S is None else Seen(*(part[slots_M] for part in state.seen))
        words = None if allowed is None else rows(allowed.view(np.int32))
        tokens_M = sample(logits_MV, rows(uniform), rules, seen, words)
        num_active = int(active.sum())
        state.seen.answer_SV[slots_M[:num_active], tokens_M[:num_active].clamp(min=0).long()] += 1
        return tokens_M

    def _receive(self, columns: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
        """Start copying to the host."""
        if self._device.type != "cuda":
            return columns, None
        arriving = tuple(
            torch.empty(c.shape, dtype=c.dtype, pin_memory=True).copy_(c, non_blocking=True) for c in columns
        )
        done = torch.cuda.Event()
        done.record()
        return arriving, done

    def _choose_threads(self, options: ModelOptions, chunk_size: int, longest: int) -> Threads:
        if options.num_threads is not None or self.team:
            return Threads(*[options.num_threads or torch.get_num_threads()] * 3)
        return choose_threads(self._decoder, self._row_counts, chunk_size, longest)

    def _cleanse(self, state: State, slot: int, start: int) -> None:
        """Overwrite what is not finite: attention multiplies rows it does not see by 0, which keeps a NaN."""
        if slot in state.poisoned:
            state.cache.clear(slot, start)
            state.poisoned.remove(slot)

    def _ids(self, array: np.ndarray) -> Tensor:
        return send(array.astype(np.int64), self._device)
