"""How a model is split over devices that compute each layer together.

q, k, v, gate and up are split along their outputs, o and down along their inputs: a layer then
sums over devices twice. A key/value head is the smallest part of k and v; where there are fewer
heads than devices, devices share them. Embedding and head are split along the vocabulary. Every expert is split,
so that a device holds a part of each; routers are held whole.
"""

from collections.abc import Mapping

from llmq.errors import ConfigError
from llmq.model.config import ModelConfig
from llmq.model.names import Kind

#: Group sizes that a refusal offers, largest first.
_GROUP_SIZES = (256, 128, 64, 32, 16)

#: How the weights end that are split along their inputs.
SPLIT_INPUTS = (".o_proj.weight", ".down_proj.weight", ".w2.weight")
_KEY_VALUE = ("self_attn.k_proj", "self_attn.v_proj")


def share(name: str, kind: Kind, config: ModelConfig, tp: int) -> float:
    """The part of a tensor that one device holds.

    Args:
        name: Of the tensor.
        kind: What it is.
        config: The model.
        tp: Devices that compute a layer together.

    Returns:
        Between 1 / `tp` and 1.
    """
    module = name.rpartition(".")[0]
    if kind in (Kind.NORM, Kind.ROUTER) or (kind is Kind.BIAS and f"{module}.weight".endswith(SPLIT_INPUTS)):
        return 1.0
    return 1 / min(tp, config.num_kv_heads) if module.endswith(_KEY_VALUE) else 1 / tp


def check_tp(tp: int, config: ModelConfig, groups: Mapping[str, tuple[int, int]]) -> None:
    """Refuse to split a model where its parts cannot be shared evenly.

    Args:
        tp: Devices that compute a layer together.
        config: The model.
        groups: Name of every blockwise quantized weight -> input features, and groups of them in a row.

    Raises:
        ConfigError: Heads, features or groups cannot be shared.
    """
    if tp < 1:
        raise ConfigError(f"tp={tp}: must be at least 1.")
    heads = config.num_kv_heads
    if config.num_heads % tp or (heads % tp and tp % heads):
        raise ConfigError(
            f"tp={tp}: {config.num_heads} heads and {heads} key/value heads cannot be shared by {tp} devices; "
            f"use --tp {_fitting(tp, config)}."
        )
    if config.intermediate_size % tp or config.vocab_size % tp:
        field = "intermediate_size" if config.intermediate_size % tp else "vocab_size"
        raise ConfigError(f"tp={tp}: does not divide the model's {field}={getattr(config, field)}; use a smaller --tp.")
    for name, (num_features, num_groups) in groups.items():
        if name.endswith(SPLIT_INPUTS) and num_groups % tp:
            sizes = [str(size) for size in _GROUP_SIZES if num_features % (size * tp) == 0]
            way_out = f"use --groupsize {' or '.join(sizes)}, or" if sizes else "use"
            raise ConfigError(
                f"tp={tp}: {name.removesuffix('.weight')} has {num_features} input features in {num_groups} groups of "
                f"{num_features // num_groups}, which {tp} devices cannot share; {way_out} another --tp."
            )


def _fitting(tp: int, config: ModelConfig) -> str:
    heads = config.num_kv_heads
    sizes = [n for n in range(1, tp) if config.num_heads % n == 0 and (heads % n == 0 or n % heads == 0)]
    return " or ".join(map(str, sizes[-2:]))
