"""Fake quantization held against torchao's, whose int4 with a float zero is the same map from codes to weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmq.backends.gpu.straight import see
from llmq.checkpoint.loader import ModelWeights
from llmq.config import SCHEMES, Scheme
from llmq.quant import quantize
from tests.backends.test_train import one_document, open_trainer, tiny

ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install llmq[qat]")
qat = pytest.importorskip("torchao.quantization.qat")

GROUP = 32

INT4 = SCHEMES["int4_blockwise"].model_copy(update={"symmetric": False, "group_size": GROUP})
INT8 = SCHEMES["int8_blockwise"].model_copy(update={"symmetric": False, "group_size": GROUP})


def torchao_quantizer(scheme: Scheme, **changes: object) -> nn.Module:
    """With a zero in float: ``(code - 2 ** (bits - 1)) * scale + zero``, as in `llmq.quant`."""
    values = {"scale_precision": torch.bfloat16, "zero_point_precision": torch.bfloat16, **changes}
    config = qat.IntxFakeQuantizeConfig(
        {4: torch.uint4, 8: torch.uint8}[scheme.num_bits],
        group_size=GROUP,
        is_symmetric=False,
        zero_point_domain=ao.ZeroPointDomain.FLOAT,
        **values,
    )
    return qat.FakeQuantizerBase.from_config(config)


def sqnr(wanted: Tensor, found: Tensor) -> float:
    """Signal to noise in decibels."""
    return float(20 * torch.log10(wanted.double().norm() / (wanted.double() - found.double()).norm()))


def gaussian() -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32))


def from_model(weights: ModelWeights, name: str) -> Tensor:
    return torch.from_numpy(np.array(weights[name], np.float32))


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=str)
def test_on_our_grid_torchao_sees_what_we_see(scheme: Scheme) -> None:
    """Given scale and zero, a code differs at most where a division rounds across a tie, and ours is the nearer one."""
    weight_OI = gaussian()
    grid = quantize(weight_OI, scheme)
    theirs = torchao_quantizer(scheme, is_dynamic=False)
    theirs.scale, theirs.zero_point = grid.scale.float(), grid.zero.float()
    ours_OI, theirs_OI = see(weight_OI, scheme, torch.float32).weight_OI, theirs(weight_OI)
    differs_OI = ours_OI != theirs_OI
    assert int(differs_OI.sum()) == {4: 0, 8: 1}[scheme.num_bits]  # of 131,072
    assert ((weight_OI - ours_OI).abs() <= (weight_OI - theirs_OI).abs() + 1e-6)[differs_OI].all()


@pytest.mark.parametrize(
    ("dtype", "between", "ours", "theirs"),
    [(torch.float32, 29.67, 22.125, 22.117), (torch.bfloat16, 27.19, 22.125, 22.080)],
    ids=str,
)
def test_on_its_own_grid_torchao_is_no_nearer(dtype: torch.dtype, between: float, ours: float, theirs: float) -> None:
    """It takes the zero from the scale before rounding it, and in bfloat16 also computes in it."""
    weight_OI = gaussian().to(dtype)
    ours_OI = see(weight_OI.float(), INT4, torch.float32).weight_OI
    theirs_OI = torchao_quantizer(INT4)(weight_OI).float()
    assert sqnr(ours_OI, theirs_OI) == pytest.approx(between, abs=0.05)
    assert sqnr(weight_OI.float(), ours_OI) == pytest.approx(ours, abs=0.005)
    assert sqnr(weight_OI.float(), theirs_OI) == pytest.approx(theirs, abs=0.005)


@pytest.mark.slow
def test_on_a_real_model_the_two_agree(smollm2: ModelWeights) -> None:
    """Its weights lie on grids of float16 scales, so both come near to them: at 42 to 48 dB."""
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.15.mlp.down_proj.weight"):
        weight_OI = from_model(smollm2, name)
        ours_OI = see(weight_OI, INT4, torch.float32).weight_OI
        assert 46 < sqnr(ours_OI, torchao_quantizer(INT4)(weight_OI)) < 48
        low_OI = weight_OI.to(torch.bfloat16)
        ours_OI = see(low_OI.float(), INT4, torch.float32).weight_OI
        theirs_OI = torchao_quantizer(INT4)(low_OI).float()
        assert 42 < sqnr(ours_OI, theirs_OI) < 44
        assert sqnr(low_OI.float(), ours_OI) > sqnr(low_OI.float(), theirs_OI) + 3


def test_a_biased_linear_is_trained_for_its_grid(tmp_path: Path) -> None:
    """torchao's module swap leaves it in float, without a word."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256, bias=False))
    swapped = qat.Int4WeightOnlyQATQuantizer(groupsize=GROUP).prepare(model)
    assert [type(module).__name__ for module in swapped] == ["Linear", "Int4WeightOnlyQATLinear"]

    weights = tiny(tmp_path, architectures=["Qwen2ForCausalLM"])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert name.replace("weight", "bias") in weights
    plain, trained = (open_trainer("gpu", weights, schemes=schemes) for schemes in ({}, {name: INT4}))
    losses = [trainer.step([one_document()], 1e-3, quantized=True).loss for trainer in (plain, trained)]
    assert losses[0] != losses[1]
    seen_OI = see(from_model(weights, name), INT4, torch.float32).weight_OI
    assert not torch.equal(seen_OI, from_model(weights, name))


def test_torchao_does_not_train_for_tinygemm() -> None:
    """Its configuration of training takes other kernels' layouts only, whose grids are not tinygemm's."""
    wanted = ao.Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    with pytest.raises(ValueError, match="Packing format must be one of"):
        ao.quantize_(nn.Linear(256, 256), qat.QATConfig(wanted, step="prepare"))
