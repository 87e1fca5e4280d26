"""Closing a training run: a checkpoint that was trained for a grid is quantized on exactly that grid."""

from collections.abc import Mapping
from typing import Any

from llmq.checkpoint import layout
from llmq.config import QuantizationConfig, validated
from llmq.errors import CheckpointError, ConfigError


def trained_config(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """What a checkpoint was trained for.

    Args:
        raw: Its ``config.json``.

    Returns:
        The configuration that training simulated; None for a checkpoint that was trained for none.

    Raises:
        CheckpointError: The field is damaged.
    """
    found = raw.get(layout.TRAINED)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {layout.TRAINED}={found!r}: must be an object.")
    return layout.read_quantization(found)


def settle(
    trained: QuantizationConfig | None, given: Mapping[str, Any], algorithm: str | None
) -> tuple[QuantizationConfig, str]:
    """The configuration and algorithm to quantize with.

    Args:
        trained: What the checkpoint was trained for, if it was.
        given: Fields of the configuration that the user named.
        algorithm: What the user named, if anything.

    Returns:
        Both; a trained grid is reached by rounding to nearest, and by nothing else.

    Raises:
        ConfigError: What the user named contradicts the training, or breaks a rule.
    """
    if trained is None:
        return validated(QuantizationConfig, **given), algorithm or "gptq"
    asked = validated(QuantizationConfig, **{**trained.model_dump(), **given})
    for field in QuantizationConfig.model_fields:
        if getattr(asked, field) != getattr(trained, field):
            raise ConfigError(
                f"{field}={getattr(asked, field)!r}: the checkpoint was trained for {getattr(trained, field)!r}; "
                "leave it out to quantize on the grid it was trained for."
            )
    if algorithm not in (None, "rtn"):
        raise ConfigError(
            f"algorithm={algorithm!r}: the checkpoint was trained for the nearest codes; leave it out or choose rtn."
        )
    return trained, "rtn"
