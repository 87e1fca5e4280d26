"""Scales of `llmq.quant.awq` folded into what makes a linear's input: the model stays what it was.

Experts of a layer read the same input as their router, which is never quantized: divided and rounded to the type it is
stored in, it would choose other experts for some tokens. Nothing is folded into the norm before them, therefore; each
expert folds scales of its own from down into up.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from llmq.backends.base import Calibrator, Stream
from llmq.config import Scheme
from llmq.convert import finite_weight
from llmq.model.config import ModelConfig
from llmq.model.names import STAGES, layer_norms
from llmq.quant import QTensor
from llmq.quant.awq import choose_scales


def _makers(config: ModelConfig) -> tuple[str, ...]:
    """What makes the input of each stage: a norm, or the rows of a linear that nothing but it comes after.

    The attention output is a mixture of v's rows, the gated input a product with up's.
    """
    norms = layer_norms(config)
    return norms.attention, "self_attn.v_proj", norms.mlp, "mlp.up_proj"


def fold_block(
    calibrator: Calibrator,
    stream: Stream,
    prefix: str,
    block: "Mapping[str, np.ndarray | QTensor]",
    schemes: Mapping[str, Scheme],
    config: ModelConfig,
    method: str,
    pool: ThreadPoolExecutor,
) -> "tuple[dict[str, np.ndarray | QTensor], dict[int, np.ndarray]]":
    """Choose scales for every stage of a block and fold them in.

    A stage is left alone unless all its linears are quantized, and the linear that makes its input as
    well: what is kept must keep its exact values.

    Args:
        calibrator: Runs the block.
        stream: What enters it.
        prefix: Of its tensors' names, for messages.
        block: Its tensors, none quantized yet.
        schemes: Tensor -> its grid.
        config: The model.
        method: How grids are found.
        pool: Threads.

    Returns:
        The block's tensors, of which those that changed are new; and for each stage that was folded what its
        input is divided by, float32 `[I]`.
    """
    folded, scales = dict(block), dict[int, np.ndarray]()
    for stage, (linears, maker) in enumerate(zip(STAGES, _makers(config), strict=True)):
        stream = calibrator.advance(stream, block, stage)
        names = [f"{linear}.weight" for linear in linears]
        is_norm = maker.endswith("norm")
        if not all(name in schemes for name in names) or not (is_norm or f"{maker}.weight" in schemes):
            continue
        moments_II = calibrator.moments(stream)
        shared = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        sharing = shared if maker == "self_attn.v_proj" else (1, 1, len(moments_II))
        rows = {name: (finite_weight(prefix + name, folded[name]), schemes[name]) for name in names}
        with threadpool_limits(1, user_api="blas"):
            scale_I = choose_scales(list(rows.values()), moments_II, sharing, method, pool)
        scales[stage] = scale_I = _divide(folded, maker, scale_I, sharing, config.norm_offset)
        folded.update({name: weight_OI * scale_I for name, (weight_OI, _) in rows.items()})
    return folded, scales


def fold_expert(
    moments_II: np.ndarray,
    prefix: str,
    block: "dict[str, np.ndarray | QTensor]",
    schemes: Mapping[str, Scheme],
    linears: tuple[str, str],
    method: str,
    pool: ThreadPoolExecutor,
) -> np.ndarray:
    """Choose scales for an expert's down and fold them into its up.

    Args:
        moments_II: Of what down reads.
        prefix: Of the block's tensors' names, for messages.
        block: Tensors; the two change.
        schemes: Tensor -> its grid.
        linears: Names of up and down.
        method: How grids are found.
        pool: Threads.

    Returns:
        What down's input is divided by, float32 `[I]`.
    """
    up, name = linears[0], f"{linears[1]}.weight"
    sharing, weight_OI = (1, 1, len(moments_II)), finite_weight(prefix + name, block[name])
    with threadpool_limits(1, user_api="blas"):
        scale_I = choose_scales([(weight_OI, schemes[name])], moments_II, sharing, method, pool)
    block[name] = weight_OI * scale_I
    return _divide(block, up, scale_I, sharing, 0.0)


def _divide(
    block: "dict[str, np.ndarray | QTensor]",
    maker: str,
    scale_I: np.ndarray,
    sharing: tuple[int, int, int],
    norm_offset: float,
) -> np.ndarray:
    """Divide what makes an input, and tell by how much it is smaller once it is rounded as it is stored."""
    weight = block[f"{maker}.weight"]
    assert isinstance(weight, np.ndarray)
    if weight.ndim == 1:
        offset = np.float32(norm_offset)
        factor = weight.astype(np.float32) + offset
        rounded = (factor / scale_I - offset).astype(weight.dtype)
        small = rounded.astype(np.float32) + offset
        # Beside an offset, what is small is rounded coarsely: a factor may vanish, or change its sign. It stays.
        rounded = np.where(small * factor > 0.0, rounded, weight)
        block[f"{maker}.weight"] = rounded
        small = rounded.astype(np.float32) + offset
        return np.divide(factor, small, out=np.ones_like(small), where=small != 0.0)
    scale_O = scale_I.reshape(sharing)[:, 0].reshape(-1)
    block[f"{maker}.weight"] = weight.astype(np.float32) / scale_O[:, None]
    if f"{maker}.bias" in block:
        bias = block[f"{maker}.bias"]
        assert isinstance(bias, np.ndarray)
        block[f"{maker}.bias"] = (bias.astype(np.float32) / scale_O).astype(bias.dtype)
    return scale_I
