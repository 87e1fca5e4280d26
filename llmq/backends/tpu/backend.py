"""The plugin behind ``--backend tpu``. JAX is imported when it is first needed."""

from collections.abc import Sequence

from llmq.backends.base import (
    Calibrator,
    CompiledStep,
    InferenceModel,
    Memory,
    ModelOptions,
    Probe,
    Trainer,
    TrainOptions,
)
from llmq.backends.tpu.chips import has_tpu_chip
from llmq.checkpoint.loader import ModelWeights


class TPUBackend:
    """See `base.Backend` and `base.Planner`."""

    name = "tpu"
    framework = "jax"

    def probe(self) -> list[Probe]:
        """See `base.Backend.probe`."""
        from llmq.backends.tpu.device import probe

        return probe()

    def has_accelerator(self) -> bool:
        """See `base.Backend.has_accelerator`."""
        return has_tpu_chip()

    def memory(self, device: str | None) -> Memory:
        """See `base.Backend.memory`."""
        from llmq.backends.tpu.device import memory

        return memory(device)

    def open_model(self, weights: ModelWeights, options: ModelOptions) -> InferenceModel:
        """See `base.Backend.open_model`."""
        from llmq.backends.tpu.device import open_devices
        from llmq.backends.tpu.infer import JaxModel

        return JaxModel(weights, options, open_devices(options.device))

    def open_calibrator(self, weights: ModelWeights, options: ModelOptions, num_threads: int) -> Calibrator:  # noqa: ARG002
        """See `base.Backend.open_calibrator`. XLA's threads are those of the process."""
        from llmq.backends.tpu.calibrate import JaxCalibrator
        from llmq.backends.tpu.device import open_device

        return JaxCalibrator(weights, options, open_device(options.device))

    def open_trainer(self, weights: ModelWeights, options: TrainOptions) -> Trainer:
        """See `base.Backend.open_trainer`."""
        from llmq.backends.tpu.train import JaxTrainer

        return JaxTrainer(weights, options)

    def compile_steps(self, weights: ModelWeights, target: str, options: ModelOptions) -> Sequence[CompiledStep]:
        """See `base.Planner.compile_steps`."""
        from llmq.backends.tpu.aot import compile_steps

        return compile_steps(weights, target, options)
