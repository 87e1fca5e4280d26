"""`base.InferenceModel` in torch."""

import numpy as np
import torch

from llmq.backends.base import Caps, ModelOptions, State
from llmq.backends.gpu.device import DTYPES, choose_device
from llmq.backends.gpu.model import Cache, Decoder
from llmq.checkpoint.loader import ModelWeights


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
            num_slots=options.num_slots,
            max_len=options.max_len,
            vocab_size=weights.config.vocab_size,
            kernels=self._decoder.kernels(),
        )

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        return Cache(self._decoder.config, self.caps.num_slots, self.caps.max_len, self._device, self._dtype)

    @torch.inference_mode()
    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        positions = np.arange(start, start + len(tokens))
        x_MD = self._decoder.forward(
            self._ids(tokens), self._ids(np.full(len(tokens), slot)), self._ids(positions), state
        )
        return state, self._decoder.logits(x_MD).cpu().numpy() if want_logits else None

    @torch.inference_mode()
    def decode(self, state: State, tokens: np.ndarray, positions: np.ndarray) -> tuple[State, np.ndarray]:
        """See `base.InferenceModel.decode`."""
        active = np.flatnonzero(positions >= 0)
        x_MD = self._decoder.forward(self._ids(tokens[active]), self._ids(active), self._ids(positions[active]), state)
        logits = np.zeros((self.caps.num_slots, self.caps.vocab_size), np.float32)
        logits[active] = self._decoder.logits(x_MD).cpu().numpy()
        return state, logits

    def _ids(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
