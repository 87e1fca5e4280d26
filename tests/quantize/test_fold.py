"""Folding moves scales and changes nothing else; chosen scales lower the error."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmq.backends.base import Calibrator, ModelOptions, Stream
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import SCHEMES
from llmq.model.names import STAGES
from llmq.quant import dequantize
from llmq.quant.awq import choose_scales
from llmq.quant.search import on_grid, search_grid
from llmq.quantize.blocks import Block, read_block
from llmq.quantize.fold import _divide, fold_block
from tests.tiny import GEMMA3, write_tiny

SCHEME = SCHEMES["int4_blockwise"].model_copy(update={"group_size": 64})


def out(calibrator: Calibrator, stream: Stream, block: Block) -> Stream:
    for stage in range(len(STAGES) + 1):
        stream = calibrator.advance(stream, block, stage)
    return stream


def folded(weights: ModelWeights, keep: str = "") -> tuple[Block, Block, dict[int, np.ndarray], float]:
    """The first block, the same folded, its scales, and how far the predictions of the two are apart."""
    calibrator = load_backend("gpu").open_calibrator(
        weights, ModelOptions(device="cpu", dtype="float32", max_len=64), 1
    )
    rng = np.random.default_rng(0)
    stream = calibrator.start([rng.integers(3, 320, 60).astype(np.int32) for _ in range(4)])
    block = read_block(weights, 0)
    schemes = {name: SCHEME for name in block if name.endswith("_proj.weight") and name != keep}
    with ThreadPoolExecutor(1) as pool:
        changed, scales = fold_block(calibrator, stream, "", block, schemes, weights.config, "nearest", pool)
    distance = calibrator.divergence(out(calibrator, stream, block), out(calibrator, stream, changed))
    return block, changed, scales, distance


FAMILIES = {"llama": {}, "qwen2": {"architectures": ["Qwen2ForCausalLM"]}, "gemma3": GEMMA3}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_folded_block_computes_the_same(tmp_path: Path, family: str, dtype: type) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=1, dtype=dtype, **FAMILIES[family])))
    block, changed, scales, distance = folded(weights)
    moved = [stage for stage, scale in scales.items() if np.ptp(scale) > 0.1]
    assert moved
    for name, tensor in changed.items():
        assert tensor is block[name] or tensor.dtype in (np.float32, block[name].dtype)
    assert distance < (1e-7 if dtype is np.float32 else 1e-6)  # a bias is rounded to the type it is stored in


def test_a_norm_that_would_vanish_beside_its_offset_stays(tmp_path: Path) -> None:
    """As bfloat16, 0.005 / 8 - 1 is -1: the feature would be lost."""
    path = write_tiny(tmp_path / "m", num_hidden_layers=1, **GEMMA3)
    weights = load_weights(str(path))
    block = dict(read_block(weights, 0))
    norm = np.full(128, 0.005 - 1).astype(ml_dtypes.bfloat16)
    norm[1::2] = 0.0
    block["input_layernorm.weight"] = norm
    large = np.full(128, 8.0, np.float32)
    scale = _divide(block, "input_layernorm", large, (1, 1, 128), 1.0)
    factor, small = (array.astype(np.float32) + 1 for array in (norm, block["input_layernorm.weight"]))
    assert (small[::2] == factor[::2]).all()
    assert (factor > 0).all()
    np.testing.assert_allclose(scale[1::2], 8.0, rtol=0.01)
    np.testing.assert_array_equal(small * scale, factor)


def test_heads_that_share_values_share_scales(tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=1, dtype=np.float32)))
    _, _, scales, _ = folded(weights)
    of_heads = scales[1].reshape(2, 2, 32)
    assert (of_heads[:, 0] == of_heads[:, 1]).all()
    assert np.ptp(of_heads) > 0.1


@pytest.mark.parametrize(
    ("keep", "left"),
    [("mlp.up_proj.weight", {2, 3}), ("self_attn.o_proj.weight", {1}), ("self_attn.v_proj.weight", {0, 1})],
)
def test_what_is_kept_keeps_its_values(tmp_path: Path, keep: str, left: set[int]) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=1)))
    block, changed, scales, _ = folded(weights, keep)
    assert changed[keep] is block[keep]
    assert set(scales) == {0, 1, 2, 3} - left


def test_chosen_scales_lower_the_error_where_few_features_are_large() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    inputs = rng.standard_normal((1000, 128))
    inputs[:, ::40] *= 30
    moments = inputs.T @ inputs

    def loss(scale: np.ndarray) -> float:
        scaled = weight * scale
        error = weight - dequantize(on_grid(scaled, *search_grid(scaled, SCHEME, "mse", pool), SCHEME)) / scale
        return float(np.vdot(error @ moments, error))

    with ThreadPoolExecutor(1) as pool:
        scale = choose_scales([(weight, SCHEME)], moments, (1, 1, 128), "mse", pool)
        assert loss(scale) < 0.5 * loss(np.ones(128, np.float32))
        flat = choose_scales([(weight, SCHEME)], np.zeros((128, 128)), (1, 1, 128), "mse", pool)
    assert (scale[::40] > 2 * np.median(scale)).all()
    assert (flat == 1).all()
