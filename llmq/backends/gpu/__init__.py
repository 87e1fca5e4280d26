"""The torch backend: tinygemm's int4 on CUDA, its CPU twin elsewhere."""

from llmq.backends.base import InferenceModel, ModelOptions, Probe
from llmq.checkpoint.loader import ModelWeights


class GPUBackend:
    """The plugin; see `llmq.backends.base.Backend`."""

    name = "gpu"

    def probe(self) -> list[Probe]:
        """See `base.Backend.probe`."""
        from llmq.backends.gpu.device import probe

        return probe()

    def open_model(self, weights: ModelWeights, options: ModelOptions) -> InferenceModel:
        """See `base.Backend.open_model`."""
        from llmq.backends.gpu.infer import TorchModel

        return TorchModel(weights, options)
