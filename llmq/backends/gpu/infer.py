"""`base.InferenceModel` in torch."""

from collections.abc import Sequence

import numpy as np
import torch

from llmq.backends.base import Caps, ModelOptions, Run, Scores, State
from llmq.backends.gpu.device import DTYPES, choose_device
from llmq.backends.gpu.model import Cache, Decoder, Place
from llmq.checkpoint.loader import ModelWeights

#: Tokens of a prompt written at once, by type of device.
_CHUNK_SIZES = {"cpu": 64, "cuda": 256}

#: Rows of logits held at once while scoring: 50 MB for a vocabulary of 49,152.
_HEAD_ROWS = 256


class TorchModel:
    """A decoder with its weights on a device; see `base.InferenceModel` for the methods.

    Args:
        weights: Read one by one.
        options: How.
    """

    def __init__(self, weights: ModelWeights, options: ModelOptions) -> None:
        self._device, dtype = choose_device(options)
        self._dtype = DTYPES[dtype]
        self._decoder = Decoder(weights, options.max_len, self._device, self._dtype)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        self.caps = Caps(
            device=f"{name}, torch {torch.__version__}",
            dtype=dtype,
            kv_dtype="int8" if options.kv_int8 else dtype,
            num_slots=options.num_slots,
            max_len=options.max_len,
            chunk_size=_CHUNK_SIZES[self._device.type],
            vocab_size=weights.config.vocab_size,
            kernels=self._decoder.kernels(),
        )

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        stored = torch.int8 if self.caps.kv_dtype == "int8" else self._dtype
        return Cache(self._decoder.config, self.caps.num_slots, self.caps.max_len, self._device, stored)

    @torch.inference_mode()
    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        rows = np.arange(start, start + len(tokens))
        one = np.zeros_like(rows)
        x_MD = self._forward(state, tokens, slot, rows, rows, start, (one, one))
        return state, self._decoder.logits(x_MD).cpu().numpy() if want_logits else None

    @torch.inference_mode()
    def score(self, state: State, slot: int, shared: int, runs: Sequence[Run]) -> tuple[State, list[Scores | None]]:
        """See `base.InferenceModel.score`."""
        lengths = [len(run.tokens) for run in runs]
        before = [shared + (0 if run.parent is None else lengths[run.parent]) for run in runs]
        parents = [index if run.parent is None else run.parent for index, run in enumerate(runs)]
        rows_M = shared + np.arange(sum(lengths))
        positions_M = np.concatenate([start + np.arange(n) for start, n in zip(before, lengths, strict=True)])
        owner_M = np.repeat(np.arange(len(runs)), lengths)
        owners = (owner_M, np.repeat(parents, lengths))
        tokens = np.concatenate([run.tokens for run in runs])
        x_MD = self._forward(state, tokens, slot, rows_M, positions_M, shared, owners)

        wanted = [run.targets for run in runs if run.targets is not None]
        if not wanted:
            return state, [None] * len(runs)
        scored = np.flatnonzero(np.repeat([run.targets is not None for run in runs], lengths))
        parts = zip(
            x_MD[self._ids(scored)].split(_HEAD_ROWS), self._ids(np.concatenate(wanted)).split(_HEAD_ROWS), strict=True
        )
        logprobs, greedy = map(torch.cat, zip(*(self._score_rows(*part) for part in parts), strict=True))
        cut = np.cumsum([len(targets) for targets in wanted])[:-1].tolist()
        split = zip(np.split(logprobs.cpu().numpy(), cut), np.split(greedy.cpu().numpy(), cut), strict=True)
        scores = (Scores(*part) for part in split)
        return state, [None if run.targets is None else next(scores) for run in runs]

    def _score_rows(self, x_MD: torch.Tensor, targets_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_MV = self._decoder.logits(x_MD)
        chosen_M = logits_MV.gather(1, targets_M[:, None])[:, 0]
        return chosen_M - logits_MV.logsumexp(dim=-1), logits_MV.argmax(dim=-1) == targets_M

    def _forward(
        self,
        state: State,
        tokens: np.ndarray,
        slot: int,
        rows: np.ndarray,
        positions: np.ndarray,
        shared: int,
        owners: tuple[np.ndarray, np.ndarray],
    ) -> torch.Tensor:
        """Run tokens of one slot; each sees the rows before `shared`, its owner's and its parent's."""
        rows_M, positions_M = self._ids(rows), self._ids(positions)
        owner_M, parent_M = map(self._ids, owners)
        rows_T = torch.arange(int(rows[-1]) + 1, device=self._device)
        owner_T = torch.cat([torch.full((shared,), -1, device=self._device), owner_M])
        visible_MT = (owner_T == -1) | (owner_T == owner_M[:, None]) | (owner_T == parent_M[:, None])
        visible_MT &= rows_T <= rows_M[:, None]
        if window := self._decoder.config.sliding_window:
            positions_T = torch.cat([rows_T[:shared], positions_M])
            visible_MT &= positions_M[:, None] - positions_T < window
        place = Place(torch.full_like(rows_M, slot), rows_M, positions_M, visible_MT)
        return self._decoder.forward(self._ids(tokens), place, state)

    def _ids(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
