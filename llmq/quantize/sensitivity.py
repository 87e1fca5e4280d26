"""What quantizing each stage of each block costs, in each scheme: measured on the unquantized model.

The output error of a linear under the second moments H of its input needs no forward pass:

    loss = tr((W - Q) H (W - Q)^T) / tr(W H W^T)

The KL divergence of the model's predictions does. It is measured once for each stage, with the stage
alone at the coarsest choice in codes of the algorithm that will be used, and taken to follow the output
error of nearest codes for the others: to second order in the error it does. All experts of a layer are
stored alike, so that of each stage they are one row; each is measured on its own inputs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from pydantic import TypeAdapter
from threadpoolctl import threadpool_limits

from llmq.backends.base import Calibrator, Stream
from llmq.checkpoint.layout import entries, entry_bytes
from llmq.checkpoint.loader import ModelWeights
from llmq.checkpoint.reader import Progress, no_progress
from llmq.config import AUTO_GROUP_SIZES, KEEP, QuantizationConfig, Scheme
from llmq.convert import finite_weight
from llmq.model.names import MLP_STAGE, STAGES, across_experts, layer_prefix
from llmq.quant import dequantize
from llmq.quant.search import on_grid, search_grid
from llmq.quantize.blocks import Block, Solver, read_block
from llmq.quantize.experts import Mixture
from llmq.quantize.options import Algorithm


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store the linears of a stage.

    Attributes:
        scheme: Its name, a key of `SCHEMES` or ``none``.
        group_size: Of a blockwise scheme.
        num_bytes: Of all linears of the stage.
        output_error: Of each linear with nearest codes, squared, relative to its output; of all experts together.
        kl: Divergence of the model's predictions when only this stage is stored so, in nats; measured for
            the coarsest candidate, estimated for the others.
    """

    scheme: str
    group_size: int | None
    num_bytes: int
    output_error: Mapping[str, float]
    kl: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """A stage of a block and its candidates, coarsest first.

    Attributes:
        linears: Module names, stored alike.
        candidates: What they may become.
    """

    linears: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns that match the linears and no others: their names, and one for those of all experts."""
        return tuple(dict.fromkeys(map(across_experts, self.linears)))

    @property
    def name(self) -> str:
        """The linears in one word."""
        linear, *more = self.patterns
        module, _, first = linear.rpartition(".")
        others = [other.rpartition(".")[2] for other in more]
        return f"{module}.{{{','.join((first, *others))}}}" if others else linear


def costs(table: Sequence[Sensitivity]) -> dict[str, float]:
    """The table in short, for the record.

    Args:
        table: All of it.

    Returns:
        Stage -> divergence with its coarsest candidate, in nats a token, to four digits.
    """
    return {row.name: float(f"{row.candidates[0].kl:.4g}") for row in table}


#: Reads and writes the cached table.
TABLE = TypeAdapter(list[Sensitivity])


def measure_sensitivity(
    calibrator: Calibrator,
    weights: ModelWeights,
    config: QuantizationConfig,
    algorithm: Algorithm,
    sequences: Sequence[np.ndarray],
    heldout: Sequence[np.ndarray],
    pool: ThreadPoolExecutor,
    progress: Progress = no_progress,
) -> list[Sensitivity]:
    """Measure every stage of every block.

    Args:
        calibrator: Runs blocks.
        weights: The model.
        config: Symmetry and types of the schemes.
        algorithm: How codes will be chosen. What it folds is not measured.
        sequences: For output errors.
        heldout: For divergence; others than `sequences`.
        pool: Threads. Their number does not change a bit of the result.
        progress: Told of stages.

    Returns:
        A row for each stage, in the order of computation.
    """
    num_layers = weights.config.num_layers
    stream, held = calibrator.start(sequences), calibrator.start(heldout)
    baseline = _through(calibrator, weights, held, {}, 0)
    table: list[Sensitivity] = []
    for index in range(num_layers):
        prefix, block, mixture = layer_prefix(index), read_block(weights, index), None
        for stage in range(len(STAGES)):
            stream = calibrator.advance(stream, block, stage)
            if stage == MLP_STAGE and weights.config.experts:
                mixture = Mixture(calibrator, stream, block, weights.config)
            measured = _Stage(prefix, block, config, algorithm, pool)
            for linears, inputs in _inputs(stream, block, stage, mixture):
                measured.add(linears, calibrator.moments(inputs))
            kl = calibrator.divergence(baseline, _through(calibrator, weights, held, measured.changed, index))
            table.append(measured.sensitivity(kl))
            progress("stages measured", len(table), num_layers * len(STAGES))
        stream = calibrator.advance(stream, block, len(STAGES))
        held = _block(calibrator, held, block)
    return table


def _inputs(
    stream: Stream, block: Block, stage: int, mixture: Mixture | None
) -> Iterator[tuple[Sequence[str], Stream]]:
    """The linears of a stage with what they read: all of them together, or those of one expert after the other."""
    if mixture is None:
        yield STAGES[stage], stream
        return
    for index in range(len(mixture.experts)):
        yield mixture.linears(index, stage), mixture.reads(stream, block, index, stage)


def _schemes(config: QuantizationConfig, num_features: int) -> Iterator[tuple[str, Scheme | None]]:
    """The candidates that fit, coarsest first."""
    for size in AUTO_GROUP_SIZES:
        if num_features % size == 0:
            yield "int4_blockwise", config.row("int4_blockwise").model_copy(update={"group_size": size})
    yield "int8_per_channel", config.row("int8_per_channel")
    yield KEEP, None


@dataclass(slots=True)
class _Tally:
    """A candidate of which linears are added one by one.

    Attributes:
        name, scheme: As in `Candidate`, and the grid.
        num_bytes: Of those that were.
        whole: Linear -> its output, squared and summed.
        lost: Linear -> the error of it, likewise.
    """

    name: str
    scheme: Scheme | None
    num_bytes: int = 0
    whole: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(
        self, linear: str, weight_OI: np.ndarray, moments_II: np.ndarray, method: str, pool: ThreadPoolExecutor
    ) -> None:
        """Add a linear: its weight in float32, the second moments of its input, and how its grid is found."""
        assert self.scheme is not None
        at, tensor = across_experts(linear), f"{linear}.weight"
        codes = on_grid(weight_OI, *search_grid(weight_OI, self.scheme, method, pool), self.scheme)
        weight, error = weight_OI.astype(np.float64), (weight_OI - dequantize(codes)).astype(np.float64)
        self.whole[at] += float(np.vdot(weight @ moments_II, weight))
        self.lost[at] += float(np.vdot(error @ moments_II, error))
        self.num_bytes += sum(map(entry_bytes, entries(tensor, weight_OI.shape, self.scheme).values()))

    def keep(self, linear: str, source: np.ndarray) -> None:
        """Add a linear that stays as it is."""
        self.whole[across_experts(linear)] += 0.0
        self.num_bytes += source.nbytes

    def candidate(self) -> Candidate:
        """What was added, without its divergence."""
        errors = {name: self.lost[name] / whole if whole > 0.0 else 0.0 for name, whole in self.whole.items()}
        return Candidate(self.name, self.scheme and self.scheme.group_size, self.num_bytes, errors, 0.0)


class _Stage:
    """Linears that are stored alike.

    Args:
        prefix: Of their block.
        block: Its tensors.
        config: Symmetry and types of the schemes.
        algorithm: How codes are chosen.
        pool: Threads.

    Attributes:
        changed: Their weights in the coarsest scheme.
    """

    def __init__(
        self, prefix: str, block: Block, config: QuantizationConfig, algorithm: Algorithm, pool: ThreadPoolExecutor
    ) -> None:
        self.changed: Block = {}
        self._prefix, self._block, self._config = prefix, block, config
        self._algorithm, self._pool = algorithm, pool
        self._linears: list[str] = []
        self._tallies: list[_Tally] = []

    def add(self, linears: Sequence[str], moments_II: np.ndarray) -> None:
        """Add linears that read an input with these second moments."""
        self._linears += linears
        if not self._tallies:
            self._tallies = [_Tally(*row) for row in _schemes(self._config, len(moments_II))]
        coarsest = self._tallies[0].scheme
        assert coarsest is not None
        worst: dict[str, tuple[np.ndarray, Scheme]] = {}
        for linear in linears:
            source = self._block[f"{linear}.weight"]
            assert isinstance(source, np.ndarray), linear
            weight_OI = finite_weight(f"{self._prefix}{linear}.weight", source)
            worst[f"{linear}.weight"] = weight_OI, coarsest
            with threadpool_limits(1, user_api="blas"):
                for tally in self._tallies:
                    if tally.scheme is None:
                        tally.keep(linear, source)
                    else:
                        tally.add(linear, weight_OI, moments_II, self._algorithm.grid, self._pool)
        with threadpool_limits(1, user_api="blas"):
            solved = Solver(moments_II, self._algorithm)(worst, self._pool)
        self.changed.update({name: codes for name, (codes, _) in solved.items()})

    def sensitivity(self, kl: float) -> Sensitivity:
        """The row of the table, with the divergence that `changed` causes."""
        candidates = [tally.candidate() for tally in self._tallies]
        return Sensitivity(
            linears=tuple(self._prefix + linear for linear in self._linears),
            candidates=tuple(_with_kl(candidate, candidates[0], kl) for candidate in candidates),
        )


def _with_kl(candidate: Candidate, coarsest: Candidate, kl: float) -> Candidate:
    error, most = sum(candidate.output_error.values()), sum(coarsest.output_error.values())
    return Candidate(
        candidate.scheme,
        candidate.group_size,
        candidate.num_bytes,
        candidate.output_error,
        kl * error / most if most > 0.0 else 0.0,
    )


def _through(calibrator: Calibrator, weights: ModelWeights, stream: Stream, changed: Block, first: int) -> Stream:
    """Run the blocks from `first` to the last, that one with changes."""
    for index in range(first, weights.config.num_layers):
        stream = _block(calibrator, stream, {**read_block(weights, index), **(changed if index == first else {})})
    return stream


def _block(calibrator: Calibrator, stream: Stream, block: Block) -> Stream:
    for stage in range(len(STAGES) + 1):
        stream = calibrator.advance(stream, block, stage)
    return stream
