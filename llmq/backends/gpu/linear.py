"""Linear layers over codes: each picks its kernel once, at load, and says which.

A matrix that no kernel takes is dequantized to the compute type at load: the same numbers from
more memory. `Linear.kernel` tells, and `llmq generate --stats` prints it.

Suffixes: M rows of activations, I input features, O output features, G groups of g features.
"""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.backends.gpu import tinygemm, xla
from llmq.errors import BackendError
from llmq.quant import QTensor, dequantize, quantize_vectors

#: By bits: from how many rows of a run on a dense product, with the weight dequantized for it, beats the
#: kernel. Measured by ``benchmarks/crossover.py`` on a CPU with AVX512; with AMX, 64 and 24 would gain a little more.
DENSE_FROM = {4: 96, 8: 32}


def to_tensor(array: np.ndarray) -> Tensor:
    """A NumPy array as a torch tensor; bfloat16 goes by its bits.

    Args:
        array: Any dtype of a checkpoint.

    Returns:
        A tensor on the CPU.
    """
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_compute(array: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A weight in the compute type, on its device.

    Args:
        array: Any dtype of a checkpoint.
        device: Where.
        dtype: Compute type.

    Returns:
        The tensor.

    Raises:
        BackendError: A weight is beyond the range of float16.
    """
    tensor = to_tensor(array)
    if dtype is torch.float16 and tensor.numel() and float(tensor.abs().max()) > torch.finfo(dtype).max:
        raise BackendError("dtype='float16': the model holds weights beyond 65504; use bfloat16 or float32.")
    return tensor.to(device=device, dtype=dtype)


class Linear:
    """``y = x @ weight.T + bias``.

    Args:
        bias: `[O]` in the compute type, or None.

    Attributes:
        kernel: What computes it, for people to read.
        dense_from: From how many rows of a run on it takes the other way.
        joins_chunks: Whether the whole chunks of a run are multiplied as one, rather than apart.
    """

    kernel = "dense"
    dense_from: float = math.inf
    joins_chunks = True

    def __init__(self, bias: Tensor | None) -> None:
        self._bias = bias

    def __call__(self, x_MI: Tensor, chunk: int = 0) -> Tensor:
        """Multiply.

        Args:
            x_MI: In the compute type, without gaps.
            chunk: Of a run of tokens, the size of the chunks that it may be cut into, which must change no bit: what is
                left behind the whole ones is multiplied apart, and may take another kernel. 0 for the rows of a step.

        Returns:
            `[M, O]` in the compute type.
        """
        parts: Sequence[Tensor] = (x_MI,)
        if chunk:
            cut = x_MI.tensor_split([len(x_MI) // chunk * chunk]) if self.joins_chunks else x_MI.split(chunk)
            parts = [part for part in cut if len(part)]
        many = [part for part in parts if chunk and len(part) >= self.dense_from]
        outs = [self._many(many)] if many else []
        outs += [self._matmul(part) for part in parts[len(many) :]]  # behind the whole chunks there are fewer rows
        y_MO = outs[0] if len(outs) == 1 else torch.cat(outs)
        return y_MO if self._bias is None else y_MO.add_(self._bias)

    def _matmul(self, x_MI: Tensor) -> Tensor:
        raise NotImplementedError

    def _many(self, parts: Sequence[Tensor]) -> Tensor:
        """What `_matmul` gives for each part, behind one another; faster where they have many rows."""
        raise NotImplementedError

    @property
    def members(self) -> Sequence["Linear"]:
        """What multiplies: itself, or what it is made of."""
        return (self,)

    @property
    def kernels(self) -> tuple[str, ...]:
        """What computes each of its parts, for people to read."""
        return (self.kernel,)

    @property
    def program(self) -> tuple[object, ...]:
        """Equal for layers that differ in what their tensors hold only."""
        held = vars(self).values()
        return (type(self), *((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in held))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as it is held."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


class DenseLinear(Linear):
    """A weight in the compute type.

    Args:
        weight_OI: The weight, on its device.
        bias: `[O]` or None.
        kernel: Why it is dense.
    """

    dense_from = 1

    def __init__(self, weight_OI: Tensor, bias: Tensor | None, kernel: str = "dense") -> None:
        super().__init__(bias)
        self._weight_OI = weight_OI
        self.kernel = kernel

    def _matmul(self, x_MI: Tensor) -> Tensor:
        return F.linear(x_MI, self._weight_OI)

    def _many(self, parts: Sequence[Tensor]) -> Tensor:
        y_MO = parts[0].new_empty(sum(map(len, parts)), len(self._weight_OI))
        tinygemm.multiply_parts(parts, self._weight_OI.T, y_MO)
        return y_MO


class Int4Linear(Linear):
    """int4 codes on tinygemm. Groups larger than the kernel's are split, which changes no number.

    Args:
        qtensor: NumPy codes that `tinygemm.refusal` does not refuse.
        bias: `[O]` or None.
        device: Where.
    """

    kernel = "int4 tinygemm"

    def __init__(self, qtensor: QTensor, bias: Tensor | None, device: torch.device) -> None:
        super().__init__(bias)
        group_size = tinygemm.kernel_group_size(qtensor)
        assert group_size
        self._group_size = group_size
        self._packed = tinygemm.prepack(to_tensor(qtensor.values), device)
        zero = np.zeros_like(qtensor.scale) if qtensor.zero is None else qtensor.zero
        scale_zero_OG2 = np.repeat(np.stack([qtensor.scale, zero], axis=-1), qtensor.group_size // group_size, axis=1)
        self._scale_zero_GO2 = to_tensor(scale_zero_OG2.transpose(1, 0, 2)).to(device)
        if tinygemm.can_unpack(device.type) and qtensor.shape[0] % tinygemm.BLOCK == 0:
            self.dense_from = DENSE_FROM[4]

    def _matmul(self, x_MI: Tensor) -> Tensor:
        return tinygemm.matmul(x_MI, self._packed, self._group_size, self._scale_zero_GO2)

    def _many(self, parts: Sequence[Tensor]) -> Tensor:
        return tinygemm.dense_matmul(parts, self._packed, self._group_size, self._scale_zero_GO2)


class Int8Linear(Linear):
    """int8 codes, one scale a row, symmetric.

    Args:
        qtensor: NumPy codes that `int8_refusal` does not refuse.
        bias: `[O]` or None.
        device: Where.
        dtype: Compute type.
    """

    kernel = "int8 weight-only"
    dense_from = DENSE_FROM[8]

    def __init__(self, qtensor: QTensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self._values_OI = to_tensor(qtensor.values).to(device)
        self._scale_O = to_tensor(qtensor.scale[:, 0]).to(device=device, dtype=dtype)

    def _matmul(self, x_MI: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x_MI, self._values_OI, self._scale_O)

    def _many(self, parts: Sequence[Tensor]) -> Tensor:
        """Codes are exact in bfloat16, so the scale can wait for the product."""
        sizes, (num_outputs, num_inputs) = [len(part) for part in parts], self._values_OI.shape
        step = max(1, tinygemm.PART // num_inputs)
        y_MO = parts[0].new_empty(sum(sizes), num_outputs)
        cut = (self._values_OI.split(step), self._scale_O.split(step), y_MO.split(step, dim=1))
        for values, scale, outs in zip(*cut, strict=True):
            weight = values.to(y_MO.dtype)
            for part, out in zip(parts, outs.split(sizes), strict=True):
                torch.mul(F.linear(part, weight), scale, out=out)
        return y_MO


class Int8InputLinear(Linear):
    """int8 codes, one scale a row, times each row of x rounded to int8: summed in integers, rounded once at the end.

    Args:
        qtensor: NumPy codes of 8 bits.
        bias: `[O]` or None.
        device: Where.
    """

    kernel = "int8 weights and inputs"

    def __init__(self, qtensor: QTensor, bias: Tensor | None, device: torch.device) -> None:
        super().__init__(None)
        self._values_IO = to_tensor(qtensor.values).to(device).T
        self._scale_O = to_tensor(qtensor.scale[:, 0]).to(device).float()
        self._zero_O = None if qtensor.zero is None else to_tensor(qtensor.zero[:, 0]).to(device).float()
        self._bias_O = None if bias is None else bias.float()

    def _matmul(self, x_MI: Tensor) -> Tensor:
        values_MI, scale_M = quantize_vectors(x_MI)
        y_MO = _integer_product(values_MI, self._values_IO) * self._scale_O
        if self._zero_O is not None:
            y_MO += values_MI.sum(dim=1, keepdim=True, dtype=torch.float32) * self._zero_O
        y_MO *= scale_M[:, None]
        return (y_MO if self._bias_O is None else y_MO + self._bias_O).to(x_MI.dtype)


def _integer_product(x_MI: Tensor, values_IO: Tensor) -> Tensor:
    """float32 `[M, O]` of int8 matrices."""
    num_rows, num_features = x_MI.shape
    if x_MI.device.type == "cpu":
        return torch.ops.aten._int_mm(x_MI, values_IO).float()
    if x_MI.device.type == "cuda" and num_features % 8 == values_IO.shape[1] % 8 == 0:  # and more than 16 rows
        return torch.ops.aten._int_mm(F.pad(x_MI, (0, 0, 0, -num_rows % 32)), values_IO)[:num_rows].float()
    return x_MI.float() @ values_IO.float()


class XlaLinear(Linear):
    """Codes of any scheme on XLA, which converts them while it multiplies.

    Args:
        qtensor: NumPy codes.
        bias: `[O]` or None.
        device: Where.
        dtype: Compute type.
    """

    def __init__(self, qtensor: QTensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.kernel = f"int{qtensor.num_bits} torch_xla"
        values_OGg = to_tensor(qtensor.values).unflatten(1, (-1, qtensor.group_size))
        values_GgO = values_OGg.permute(1, 2, 0).contiguous()
        self._values_GgO = xla.cast_int4(values_GgO, device) if qtensor.num_bits == 4 else values_GgO.to(device)
        self._scale_GO = to_tensor(qtensor.scale.T).to(device=device, dtype=dtype)
        self._minus_zero_GO = None
        if qtensor.zero is not None:
            self._minus_zero_GO = to_tensor(-qtensor.zero.T).to(device=device, dtype=dtype)

    def _matmul(self, x_MI: Tensor) -> Tensor:
        return xla.matmul(x_MI, self._values_GgO, self._scale_GO, self._minus_zero_GO)


class SideBySide(Linear):
    """Linears that read the same input and share no kernel.

    Args:
        linears: Their outputs stand behind one another.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__(None)
        self._linears = linears

    def __call__(self, x_MI: Tensor, chunk: int = 0) -> Tensor:
        """See `Linear.__call__`."""
        return torch.cat([linear(x_MI, chunk) for linear in self._linears], dim=-1)

    @property
    def members(self) -> Sequence[Linear]:
        """See `Linear.members`."""
        return self._linears

    @property
    def kernels(self) -> tuple[str, ...]:
        """See `Linear.kernels`."""
        return tuple(kernel for linear in self._linears for kernel in linear.kernels)

    @property
    def program(self) -> tuple[object, ...]:
        """See `Linear.program`."""
        return tuple(linear.program for linear in self._linears)

    @property
    def num_bytes(self) -> int:
        """See `Linear.num_bytes`."""
        return sum(linear.num_bytes for linear in self._linears)


def int8_refusal(qtensor: QTensor, device: torch.device, dtype: torch.dtype) -> str:
    """Why the int8 kernel cannot run a matrix.

    Args:
        qtensor: int8 codes `[O, I]`.
        device: Where.
        dtype: Compute type.

    Returns:
        The reason; empty when it can.
    """
    if qtensor.scale.shape[-1] != 1:
        return "the int8 kernel takes one scale a row"
    if not qtensor.symmetric:
        return "the int8 kernel is symmetric"
    if dtype is not torch.bfloat16 or device.type != "cpu":
        return f"the int8 kernel is used in bfloat16 on the CPU, not in {str(dtype).removeprefix('torch.')} on {device.type}"
    if qtensor.shape[1] % 16:  # torch 2.13 reads past the row: wrong results or a crash
        return f"{qtensor.shape[1]} inputs: the int8 kernel takes multiples of 16"
    return ""


def make_linear(
    weight: np.ndarray | QTensor,
    bias: np.ndarray | None,
    device: torch.device,
    dtype: torch.dtype,
    int8_inputs: bool = False,
) -> Linear:
    """Load a weight onto the kernel that takes it.

    Args:
        weight: `[O, I]`, codes or an array.
        bias: `[O]` or None.
        device: Where.
        dtype: Compute type.
        int8_inputs: Whether it takes its inputs in int8; then there are codes of 8 bits, one scale a row.

    Returns:
        The layer.

    Raises:
        BackendError: See `to_compute`.
    """
    bias_O = None if bias is None else to_compute(bias, device, dtype)
    if not isinstance(weight, QTensor):
        return DenseLinear(to_compute(weight, device, dtype), bias_O)
    if int8_inputs:
        return Int8InputLinear(weight, bias_O, device)
    if device.type == "xla":
        return XlaLinear(weight, bias_O, device, dtype)
    refuse = tinygemm.refusal if weight.num_bits == 4 else int8_refusal
    reason = refuse(weight, device, dtype)
    if reason:
        dense = to_compute(dequantize(weight), device, dtype)
        return DenseLinear(dense, bias_O, f"int{weight.num_bits} dequantized at load: {reason}")
    if weight.num_bits == 4:
        return Int4Linear(weight, bias_O, device)
    return Int8Linear(weight, bias_O, device, dtype)


def make_joined(
    weights: Sequence[np.ndarray | QTensor],
    biases: Sequence[np.ndarray | None],
    device: torch.device,
    dtype: torch.dtype,
    int8_inputs: Sequence[bool] = (),
) -> Linear:
    """Load weights that read the same input: onto one kernel where they are stored alike.

    That changes no bit: a kernel computes every output by itself.

    Args:
        weights: `[O, I]` each.
        biases: `[O]` or None each.
        device: Where.
        dtype: Compute type.
        int8_inputs: Whether each takes its inputs in int8; none does by default.

    Returns:
        A layer whose outputs stand behind one another.

    Raises:
        BackendError: See `to_compute`.
    """
    present = [bias for bias in biases if bias is not None]
    int8_inputs = int8_inputs or [False] * len(weights)
    stored = {(_storage(weight), rounds) for weight, rounds in zip(weights, int8_inputs, strict=True)}
    if len(stored) > 1 or len(present) not in (0, len(weights)):
        each = zip(weights, biases, int8_inputs, strict=True)
        return SideBySide([make_linear(weight, bias, device, dtype, rounds) for weight, bias, rounds in each])
    bias = np.concatenate(present) if present else None
    return make_linear(_concatenated(weights), bias, device, dtype, int8_inputs[0])


def _storage(weight: np.ndarray | QTensor) -> tuple[object, ...]:
    """Equal for matrices that can be concatenated along O."""
    if not isinstance(weight, QTensor):
        return (weight.dtype,)
    return (weight.num_bits, weight.scale.shape[1:], weight.scale.dtype, weight.symmetric)


def _concatenated(weights: Sequence[np.ndarray | QTensor]) -> np.ndarray | QTensor:
    codes = [weight for weight in weights if isinstance(weight, QTensor)]
    if not codes:
        return np.concatenate([weight for weight in weights if not isinstance(weight, QTensor)])
    values, scale = (np.concatenate([getattr(part, name) for part in codes]) for name in ("values", "scale"))
    zeros = [part.zero for part in codes if part.zero is not None]
    return QTensor(values, scale, np.concatenate(zeros) if zeros else None, codes[0].num_bits)
