"""`base.InferenceModel` in torch."""

from collections.abc import Sequence

import numpy as np
import torch

from llmq.backends.base import Caps, ModelOptions, Scores, State
from llmq.backends.gpu.device import DTYPES, choose_device
from llmq.backends.gpu.model import Cache, Decoder, Place
from llmq.checkpoint.loader import ModelWeights

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
        x_MD = self._forward(state, tokens, np.full(len(tokens), slot), rows)
        return state, self._decoder.logits(x_MD).cpu().numpy() if want_logits else None

    @torch.inference_mode()
    def decode(self, state: State, tokens: np.ndarray, positions: np.ndarray) -> tuple[State, np.ndarray]:
        """See `base.InferenceModel.decode`."""
        active = np.flatnonzero(positions >= 0)
        x_MD = self._forward(state, tokens[active], active, positions[active])
        logits = np.zeros((self.caps.num_slots, self.caps.vocab_size), np.float32)
        logits[active] = self._decoder.logits(x_MD).cpu().numpy()
        return state, logits

    @torch.inference_mode()
    def score(
        self, state: State, slot: int, shared: int, runs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> tuple[State, list[Scores]]:
        """See `base.InferenceModel.score`."""
        lengths = [len(run) for run in runs]
        ends = np.cumsum(lengths)
        rows, first = shared + np.arange(ends[-1]), np.repeat(shared + ends - lengths, lengths)
        x_MD = self._forward(state, np.concatenate(runs), np.full(len(rows), slot), rows, first, shared)
        parts = zip(x_MD.split(_HEAD_ROWS), self._ids(np.concatenate(targets)).split(_HEAD_ROWS), strict=True)
        logprobs, greedy = map(torch.cat, zip(*(self._score_rows(*part) for part in parts), strict=True))
        cut = ends[:-1].tolist()
        split = zip(np.split(logprobs.cpu().numpy(), cut), np.split(greedy.cpu().numpy(), cut), strict=True)
        return state, [Scores(*part) for part in split]

    def _score_rows(self, x_MD: torch.Tensor, targets_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_MV = self._decoder.logits(x_MD)
        chosen_M = logits_MV.gather(1, targets_M[:, None])[:, 0]
        return chosen_M - logits_MV.logsumexp(dim=-1), logits_MV.argmax(dim=-1) == targets_M

    def _forward(
        self,
        state: State,
        tokens: np.ndarray,
        slots: np.ndarray,
        rows: np.ndarray,
        first: np.ndarray | None = None,
        shared: int = 0,
    ) -> torch.Tensor:
        first = np.zeros_like(rows) if first is None else first
        place = Place(self._ids(slots), self._ids(rows), self._ids(first), shared)
        return self._decoder.forward(self._ids(tokens), place, state)

    def _ids(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
