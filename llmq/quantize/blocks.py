"""Quantizing a model block by block, each for what the quantized blocks before it give it.

A block has four stages (`llmq.model.names.STAGES`): linears that read the same input. A stage is
quantized for the second moments of its input as the already quantized stages compute it, so that
later linears see, and make up for, what earlier ones lost. Beside that stream of activations runs a
second one, of the model as it was; the difference between the two moves the target of each linear:

    min over W'  sum |W x~ - W' x|^2   =>   W' = W C H^-1        C = sum x~ x^T,  H = sum x x^T

with x~ the input in the unquantized model. In memory are one block, and the two streams. Of a mixture the
experts are quantized one after the other, see `experts`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from threadpoolctl import threadpool_limits

from llmq.backends.base import Calibrator, Stream
from llmq.checkpoint.loader import ModelWeights
from llmq.config import Scheme
from llmq.convert import finite_weight
from llmq.model.names import MLP_STAGE, STAGES, layer_prefix
from llmq.quant import QTensor, dequantize
from llmq.quant.gptq import Moments, solve
from llmq.quant.search import on_grid, search_grid
from llmq.quantize.experts import Mixture, module_of
from llmq.quantize.fold import fold_block, fold_expert
from llmq.quantize.options import Algorithm

#: Tensors of a layer by their names without its prefix.
Block = dict[str, "np.ndarray | QTensor"]

#: How far targets follow the difference between the streams. 1 would be exact, and fit noise.
CORRECTION = 0.5

#: Most rows solved together: each step is a few calls for all of them, and threads share out the pieces.
_PIECE_ROWS = 512


@dataclass(frozen=True, slots=True)
class QuantizedBlock:
    """A finished block.

    Attributes:
        index: Which layer.
        tensors: What changed: codes of its linears, and tensors that scales were folded into.
        errors: Linear -> error of its output relative to the output, for the inputs it sees.
        few_tokens: Expert -> tokens that chose it, where it was shown others as well, see `experts`.
    """

    index: int
    tensors: Block
    errors: Mapping[str, float]
    few_tokens: Mapping[str, int] = field(default_factory=dict[str, int])


def quantize_blocks(
    calibrator: Calibrator,
    weights: ModelWeights,
    schemes: Mapping[str, Scheme],
    sequences: Sequence[np.ndarray],
    algorithm: Algorithm,
    pool: ThreadPoolExecutor,
    finished: Callable[[int], QuantizedBlock | None] = lambda _: None,
) -> Iterator[QuantizedBlock]:
    """Quantize the linears of a model.

    Args:
        calibrator: Runs blocks.
        weights: The model as it was.
        schemes: Weight name -> its grid; linears that are not listed stay as they are.
        sequences: What to calibrate on.
        algorithm: How.
        pool: Threads of the solver. Their number does not change a bit of the result.
        finished: Gives blocks that an earlier run has finished; they are only run.

    Yields:
        Each block, in order.
    """
    before = calibrator.start(sequences)
    stream = before
    for index in range(weights.config.num_layers):
        prefix, source = layer_prefix(index), read_block(weights, index)
        mine = {name: schemes[prefix + name] for name in source if prefix + name in schemes}
        done, block, scales = finished(index), dict(source), dict[int, np.ndarray]()
        if done:
            block.update(done.tensors)
        elif algorithm.fold:
            block, scales = fold_block(calibrator, stream, prefix, source, mine, weights.config, algorithm.grid, pool)
        work = _Work(calibrator, algorithm, pool, prefix, source, block, mine)
        for stage, linears in enumerate((*STAGES, ())):
            before, stream = calibrator.advance(before, source, stage), calibrator.advance(stream, block, stage)
            if done:
                continue
            work.quantize(linears, before, stream, scales.get(stage))
            if stage == MLP_STAGE and weights.config.experts:
                work.quantize_experts(Mixture(calibrator, stream, block, weights.config), before, stream)
        changed = {name: tensor for name, tensor in block.items() if tensor is not source[name]}
        yield done or QuantizedBlock(index, changed, work.errors, work.few_tokens)


def read_block(weights: ModelWeights, index: int) -> Block:
    """The tensors of a layer.

    Args:
        weights: The model.
        index: Which layer.

    Returns:
        By their names without the layer's prefix.
    """
    prefix = layer_prefix(index)
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}


@dataclass(slots=True)
class _Work:
    """A block that is being quantized.

    Attributes:
        calibrator: Runs it.
        algorithm: How.
        pool: Threads.
        prefix: Of its tensors' names, for messages.
        source: Its tensors as they were.
        block: The same, linears of which become codes.
        schemes: Tensor -> its grid.
        errors: Of the linears that have.
        few_tokens: As in `QuantizedBlock`.
    """

    calibrator: Calibrator
    algorithm: Algorithm
    pool: ThreadPoolExecutor
    prefix: str
    source: Block
    block: Block
    schemes: Mapping[str, Scheme]
    errors: dict[str, float] = field(default_factory=dict[str, float])
    few_tokens: dict[str, int] = field(default_factory=dict[str, int])

    def quantize(self, linears: Sequence[str], before: Stream, stream: Stream, scale_I: np.ndarray | None) -> None:
        """Quantize linears that read the same input, those of them that have a grid.

        Args:
            linears: Their names.
            before: Their input in the model as it was.
            stream: Their input.
            scale_I: What features of it were divided by on purpose.
        """
        names = [f"{linear}.weight" for linear in linears if f"{linear}.weight" in self.schemes]
        if not names:
            return
        moments_II = self.calibrator.moments(stream)
        drift_II = self.calibrator.drift(before, stream, scale_I) if self.algorithm.feedback else None
        with threadpool_limits(1, user_api="blas"):
            solver = Solver(moments_II, self.algorithm, drift_II)
            asked = {name: (finite_weight(self.prefix + name, self.block[name]), self.schemes[name]) for name in names}
            for name, (codes, error) in solver(asked, self.pool).items():
                self.block[name], self.errors[name] = codes, error

    def quantize_experts(self, mixture: Mixture, before: Stream, stream: Stream) -> None:
        """Quantize the experts of a mixture.

        Args:
            mixture: They, and the tokens they see.
            before: What they read in the model as it was.
            stream: What they read.
        """
        for index, names in enumerate(mixture.experts):
            scale_I = self._fold_expert(mixture, stream, index) if self.algorithm.fold else None
            for stage in (MLP_STAGE, MLP_STAGE + 1):
                linears = mixture.linears(index, stage)
                if not any(f"{linear}.weight" in self.schemes for linear in linears):
                    continue
                now = mixture.reads(stream, self.block, index, stage)
                was = mixture.reads(before, self.source, index, stage) if self.algorithm.feedback else now
                self.quantize(linears, was, now, None if stage == MLP_STAGE else scale_I)
                if mixture.is_short(index, stage):
                    self.few_tokens[module_of(names)] = mixture.counts[index]

    def _fold_expert(self, mixture: Mixture, stream: Stream, index: int) -> np.ndarray | None:
        _, up, down = mixture.experts[index]
        if not all(f"{linear}.weight" in self.schemes for linear in (up, down)):
            return None
        moments_II = self.calibrator.moments(mixture.reads(stream, self.block, index, MLP_STAGE + 1))
        return fold_expert(
            moments_II, self.prefix, self.block, self.schemes, (up, down), self.algorithm.grid, self.pool
        )


class Solver:
    """Quantizes the linears of a stage.

    Args:
        moments_II: Of the stage's input.
        algorithm: How.
        drift_II: Of the input from that of the unquantized model, against the input; None where they are the same.
    """

    def __init__(self, moments_II: np.ndarray, algorithm: Algorithm, drift_II: np.ndarray | None = None) -> None:
        self._grid, self._drift_II = algorithm.grid, None
        mean = np.float64(np.trace(moments_II) / len(moments_II)) or np.float64(1.0)
        self._moments_II = (moments_II / mean).astype(np.float32)
        self._moments = Moments.of(moments_II) if algorithm.feedback else None
        if drift_II is not None:
            self._drift_II = (drift_II * (CORRECTION / mean)).astype(np.float32)

    def __call__(
        self, linears: Mapping[str, tuple[np.ndarray, Scheme]], pool: ThreadPoolExecutor
    ) -> dict[str, tuple[QTensor, float]]:
        """Choose codes. BLAS must be kept at one thread.

        Args:
            linears: Weights, float32 `[O, I]`, each with its grid.
            pool: Threads, which share out pieces of rows. Their number does not change a bit of the result.

        Returns:
            Of each linear the codes, and the error of the output relative to the output.
        """
        tasks = {
            name: [pool.submit(self._solve, weight_OI[rows], scheme) for rows in _pieces(len(weight_OI))]
            for name, (weight_OI, scheme) in linears.items()
        }
        solved = {name: [task.result() for task in mine] for name, mine in tasks.items()}
        return {name: (_joined([part.codes for part in parts]), _error(parts)) for name, parts in solved.items()}

    def _solve(self, weight_OI: np.ndarray, scheme: Scheme) -> "_Rows":
        target_OI = weight_OI
        if self._drift_II is not None and self._moments is not None:
            target_OI = weight_OI + self._moments.divide(weight_OI @ self._drift_II)
        scale_OG, zero_OG = search_grid(target_OI, scheme, self._grid)
        if self._moments is None:
            codes = on_grid(target_OI, scale_OG, zero_OG, scheme)
        else:
            codes = solve(target_OI, scale_OG, zero_OG, self._moments, scheme)
        return _Rows(codes, self._squared(weight_OI), self._squared(weight_OI - dequantize(codes)))

    def _squared(self, matrix_OI: np.ndarray) -> float:
        """What it makes of the inputs, squared and summed."""
        return float(np.multiply(matrix_OI @ self._moments_II, matrix_OI).sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a linear, solved.

    Attributes:
        codes: Theirs.
        whole: Their outputs, squared and summed.
        lost: The errors of these, likewise.
    """

    codes: QTensor
    whole: float
    lost: float


def _pieces(num_rows: int) -> list[slice]:
    """Rows in pieces of about the same size."""
    bounds = np.linspace(0, num_rows, -(-num_rows // _PIECE_ROWS) + 1).astype(int).tolist()
    return list(map(slice, bounds, bounds[1:]))


def _joined(parts: Sequence[QTensor]) -> QTensor:
    zeros = [part.zero for part in parts if part.zero is not None]
    return QTensor(
        values=np.concatenate([part.values for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        zero=np.concatenate(zeros) if zeros else None,
        num_bits=parts[0].num_bits,
    )


def _error(parts: Sequence[_Rows]) -> float:
    """Norm of the output's error over that of the output."""
    whole, lost = sum(part.whole for part in parts), sum(part.lost for part in parts)
    return (max(lost, 0.0) / whole) ** 0.5 if whole > 0.0 else 0.0
