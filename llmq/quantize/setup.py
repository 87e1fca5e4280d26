"""What calibration needs, opened once: sequences, a backend that runs blocks, threads for the solver."""

import hashlib
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq.backends.base import Calibrator, ModelOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.reader import Progress, no_progress
from llmq.convert import ConversionPlan
from llmq.errors import ConfigError
from llmq.model.tokenizer import Tokenizer
from llmq.quantize.blocks import QuantizedBlock
from llmq.quantize.data import calibration_sequences, hold_out, read_dataset
from llmq.quantize.options import QuantizeOptions

#: Held-out sequences that sensitivity is measured on.
_HELDOUT_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Run:
    """How a run is carried out; nothing here changes a byte of the result.

    Attributes:
        force: Replace an existing output.
        resume: Go on where an interrupted run to the same output stopped.
        command: The command line, for the record.
        num_threads: None takes every core.
        progress: Told of stages and blocks, then of bytes written.
        tell: Told of every finished block.
    """

    force: bool = False
    resume: bool = False
    command: Sequence[str] = ()
    num_threads: int | None = None
    progress: Progress = no_progress
    tell: Callable[[QuantizedBlock], None] = lambda _: None


#: Every core, nobody told.
PLAIN = Run()


@dataclass(frozen=True, slots=True)
class Setup:
    """What calibration needs.

    Attributes:
        weights: The source.
        sequences: To calibrate on.
        heldout: Others, to measure on; empty without a target.
        calibrator: Runs blocks.
        pool: Threads of the solver.
        facts: What identifies all this, as JSON values.
    """

    weights: ModelWeights
    sequences: list[np.ndarray]
    heldout: list[np.ndarray]
    calibrator: Calibrator
    pool: ThreadPoolExecutor
    facts: dict[str, Any]


@contextmanager
def set_up(plan: ConversionPlan, options: QuantizeOptions, run: Run) -> Generator[Setup]:
    """Open everything.

    Args:
        plan: The model.
        options: Data and backend.
        run: Threads.

    Yields:
        What calibration needs.

    Raises:
        LlmqError: The options do not fit the model or the data.
    """
    assert options.dataset is not None
    weights = load_weights(plan.model)
    if options.seq_len > weights.config.max_positions:
        raise ConfigError(
            f"seq_len={options.seq_len}: must be at most the model's context, {weights.config.max_positions}."
        )
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    text, rest = read_dataset(options.dataset, options.num_tokens), ""
    if options.holds_out:
        text, rest = hold_out(text)
    cut = (options.seq_len, options.seed, options.dataset)
    sequences = calibration_sequences(tokenizer, text, options.num_samples, *cut)
    heldout = calibration_sequences(tokenizer, rest, _HELDOUT_SAMPLES, *cut) if rest else []
    plugin, device = select_backend(options.backend, options.device)
    num_threads = run.num_threads or len(os.sched_getaffinity(0))
    opened = ModelOptions(device=device, dtype=options.dtype, max_len=options.seq_len)
    tokens = np.concatenate(sequences + heldout).astype("<i4").tobytes()
    facts = {
        "model": plan.model,
        "files": {name: [(at := path.stat()).st_size, at.st_mtime_ns] for name, path in plan.reader.files.items()},
        "num_samples": options.num_samples,
        "seq_len": options.seq_len,
        "seed": options.seed,
        "tokens": hashlib.sha256(tokens).hexdigest(),
        "backend": plugin.name,
        "device": device,
        "dtype": options.dtype,
    }
    with ThreadPoolExecutor(num_threads) as pool:
        calibrator = plugin.open_calibrator(weights, opened, num_threads)
        yield Setup(weights, sequences, heldout, calibrator, pool, facts)
