"""What quantizing each stage of each block costs, in each scheme: measured on the unquantized model.

The output error of a linear under the second moments H of its input needs no forward pass:

    loss = tr((W - Q) H (W - Q)^T) / tr(W H W^T)

The KL divergence of the model's predictions does. It is measured once for each stage, with the stage
alone at the coarsest choice in codes of the algorithm that will be used, and taken to follow the output
error of nearest codes for the others: to second order in the error it does.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter
from threadpoolctl import threadpool_limits

from llmq.backends.base import Calibrator, Stream
from llmq.checkpoint.layout import entries, entry_bytes
from llmq.checkpoint.loader import ModelWeights
from llmq.checkpoint.reader import Progress, no_progress
from llmq.config import AUTO_GROUP_SIZES, KEEP, QuantizationConfig, Scheme
from llmq.convert import finite_weight
from llmq.model.names import STAGES, layer_prefix
from llmq.quant import dequantize
from llmq.quant.search import on_grid, search_grid
from llmq.quantize.blocks import Block, Solver, read_block
from llmq.quantize.options import Algorithm


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store the linears of a stage.

    Attributes:
        scheme: Its name, a key of `SCHEMES` or ``none``.
        group_size: Of a blockwise scheme.
        num_bytes: Of all linears of the stage.
        output_error: Of each linear with nearest codes, squared, relative to its output.
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
    def name(self) -> str:
        """The linears in one word."""
        module, _, first = self.linears[0].rpartition(".")
        others = [linear.rpartition(".")[2] for linear in self.linears[1:]]
        return f"{module}.{{{','.join((first, *others))}}}" if others else self.linears[0]


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
        block = read_block(weights, index)
        for stage, linears in enumerate(STAGES):
            stream = calibrator.advance(stream, block, stage)
            moments_II = calibrator.moments(stream)
            names = [f"{linear}.weight" for linear in linears]
            with threadpool_limits(1, user_api="blas"):
                rows = list(_schemes(config, moments_II))
                candidates = [_candidate(block, names, moments_II, row, algorithm.grid, pool) for row in rows]
                coarsest = rows[0][1]
                assert coarsest is not None
                worst = {name: (finite_weight(layer_prefix(index) + name, block[name]), coarsest) for name in names}
                solved = Solver(moments_II, algorithm)(worst, pool)
                changed: Block = {name: codes for name, (codes, _) in solved.items()}
            kl = calibrator.divergence(baseline, _through(calibrator, weights, held, changed, index))
            table.append(
                Sensitivity(
                    linears=tuple(layer_prefix(index) + linear for linear in linears),
                    candidates=tuple(_with_kl(candidate, candidates[0], kl) for candidate in candidates),
                )
            )
            progress("stages measured", len(table), num_layers * len(STAGES))
        stream = calibrator.advance(stream, block, len(STAGES))
        held = _block(calibrator, held, block)
    return table


def _schemes(config: QuantizationConfig, moments_II: np.ndarray) -> Iterator[tuple[str, Scheme | None]]:
    """The candidates that fit, coarsest first."""
    for size in AUTO_GROUP_SIZES:
        if len(moments_II) % size == 0:
            yield "int4_blockwise", config.row("int4_blockwise").model_copy(update={"group_size": size})
    yield "int8_per_channel", config.row("int8_per_channel")
    yield KEEP, None


def _candidate(
    block: Block,
    names: Sequence[str],
    moments_II: np.ndarray,
    row: tuple[str, Scheme | None],
    method: str,
    pool: ThreadPoolExecutor,
) -> Candidate:
    """A candidate without its divergence."""
    name, scheme = row
    errors: dict[str, float] = {}
    num_bytes = 0
    for tensor in names:
        source = block[tensor]
        if scheme is None:
            assert isinstance(source, np.ndarray)
            num_bytes += source.nbytes
            errors[tensor.removesuffix(".weight")] = 0.0
            continue
        weight_OI = finite_weight(tensor, block[tensor])
        codes = on_grid(weight_OI, *search_grid(weight_OI, scheme, method, pool), scheme)
        weight, error = weight_OI.astype(np.float64), (weight_OI - dequantize(codes)).astype(np.float64)
        whole, lost = (float(np.vdot(matrix @ moments_II, matrix)) for matrix in (weight, error))
        errors[tensor.removesuffix(".weight")] = lost / whole if whole > 0.0 else 0.0
        num_bytes += sum(map(entry_bytes, entries(tensor, weight_OI.shape, scheme).values()))
    return Candidate(name, scheme and scheme.group_size, num_bytes, errors, 0.0)


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
