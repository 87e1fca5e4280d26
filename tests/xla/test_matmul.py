"""Codes of every scheme through torch_xla's quantized matmul, against the dequantized reference."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

from llmq.backends.base import ModelOptions
from llmq.backends.gpu import xla
from llmq.backends.gpu.linear import make_linear
from llmq.config import Scheme
from llmq.quant import QTensor, quantize
from tests.backends.bounds import assert_accumulation_only
from tests.backends.test_train import GRIDS

torch_xla = pytest.importorskip("torch_xla", reason="needs the environment of `make test-xla`")

INT4_CONSTANT = re.compile(r"= s4\[[\d,]*\]\S* constant\(")
INT4_ARGUMENT = re.compile(r"= s4\[[\d,]*\]\S* parameter\(")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return xla.choose_device(ModelOptions(device="cpu"))[0]


def codes(scheme: Scheme) -> QTensor:
    weight = np.random.default_rng(0).standard_normal((96, 384)) / np.sqrt(384) + 0.01
    return quantize(weight.astype(ml_dtypes.bfloat16), scheme)


def program(tensor: torch.Tensor) -> str:
    """What would compute a tensor, as text."""
    return torch_xla._XLAC._get_xla_tensors_hlo([tensor])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", GRIDS, ids=str)
def test_within_accumulation(scheme: Scheme, dtype: torch.dtype, device: torch.device) -> None:
    weight = codes(scheme)
    bias = np.random.default_rng(1).standard_normal(96).astype(ml_dtypes.bfloat16)
    linear = make_linear(weight, bias, device, dtype)
    assert linear.kernel == f"int{scheme.num_bits} torch_xla"
    for num_rows in (1, 7):
        x = np.random.default_rng(num_rows).standard_normal((num_rows, 384)).astype(np.float32)
        x_MI = torch.from_numpy(x).to(dtype)
        y_MO = linear(x_MI.to(device))
        assert y_MO.dtype is dtype
        y = y_MO.cpu().float().numpy()
        assert_accumulation_only(y, x_MI.float().numpy(), weight, bias, bfloat16=dtype is torch.bfloat16)


@pytest.mark.parametrize("scheme", [scheme for scheme in GRIDS if scheme.num_bits == 4], ids=str)
def test_int4_codes_are_an_argument_of_the_program(scheme: Scheme, device: torch.device) -> None:
    """Cast once: no call casts them again, and none has them built in."""
    linear = make_linear(codes(scheme), None, device, torch.float32)
    for num_rows in (1, 7):
        text = program(linear(torch.ones(num_rows, 384, device=device)))
        assert len(INT4_ARGUMENT.findall(text)) == 1
        assert not INT4_CONSTANT.search(text)
        assert "s8[" not in text


def test_the_constant_would_be_seen(device: torch.device) -> None:
    """torch_xla's own ``int4_weight=True`` builds the codes into the program."""
    weight = codes(GRIDS[2])
    values_1IO = torch.from_numpy(weight.values).t().contiguous()[None].to(device)
    scale_1O = torch.ones(1, 96, device=device)
    y = torch.ops.xla.quantized_matmul(
        torch.ones(1, 384, device=device), values_1IO, scale_1O, None, block_size=384, int4_weight=True
    )
    assert INT4_CONSTANT.search(program(y))
