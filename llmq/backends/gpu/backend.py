"""The plugin behind ``--backend gpu``. torch is imported when it is first needed."""

from llmq.backends.base import Calibrator, InferenceModel, Memory, ModelOptions, Probe, Trainer, TrainOptions
from llmq.checkpoint.loader import ModelWeights


class GPUBackend:
    """See `base.Backend`."""

    name = "gpu"
    framework = "torch"

    def probe(self) -> list[Probe]:
        """See `base.Backend.probe`."""
        from llmq.backends.gpu.device import probe

        return probe()

    def has_accelerator(self) -> bool:
        """See `base.Backend.has_accelerator`."""
        from llmq.backends.gpu.device import has_cuda

        return has_cuda()

    def memory(self, device: str | None) -> Memory:
        """See `base.Backend.memory`."""
        from llmq.backends.gpu.device import memory

        return memory(device)

    def open_model(self, weights: ModelWeights, options: ModelOptions) -> InferenceModel:
        """See `base.Backend.open_model`. Of processes that share a model the first returns; the others follow it and end."""
        from llmq.backends.gpu.infer import TorchModel
        from llmq.backends.gpu.parallel import LeadingModel, follow

        model = TorchModel(weights, options)
        if model.team is None:
            return model
        if model.team.rank > 0:
            follow(model, model.team)
            raise SystemExit(0)
        return LeadingModel(model, model.team)

    def open_calibrator(self, weights: ModelWeights, options: ModelOptions, num_threads: int) -> Calibrator:
        """See `base.Backend.open_calibrator`."""
        from llmq.backends.gpu.calibrate import TorchCalibrator

        return TorchCalibrator(weights, options, num_threads)

    def open_trainer(self, weights: ModelWeights, options: TrainOptions) -> Trainer:
        """See `base.Backend.open_trainer`."""
        from llmq.backends.gpu.train import TorchTrainer

        return TorchTrainer(weights, options)
