"""The plugin behind ``--backend tpu``."""

from llmq.backends.base import ModelOptions, Probe
from llmq.backends.tpu import device
from llmq.backends.tpu.infer import JaxModel
from llmq.checkpoint.loader import ModelWeights


class TPUBackend:
    """See `base.Backend`."""

    name = "tpu"

    def probe(self) -> list[Probe]:
        """See `base.Backend.probe`."""
        return device.probe()

    def open_model(self, weights: ModelWeights, options: ModelOptions) -> JaxModel:
        """See `base.Backend.open_model`."""
        return JaxModel(weights, options, device.open_device(options.device))
