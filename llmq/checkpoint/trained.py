"""What a checkpoint was trained for: ``llmq qat`` notes it, and whatever quantizes holds to it.

``config.json`` of a float checkpoint carries it under `layout.TRAINED`, as `layout.quantization_dict`.
Rounding its weights to nearest on those grids gives the codes that training used, and nothing else does.
"""

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
        ArtifactError: It is of a newer llmq.
    """
    found = raw.get(layout.TRAINED)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {layout.TRAINED}={found!r}: must be an object.")
    return layout.read_quantization(found)


def check_trained(trained: QuantizationConfig | None, given: Mapping[str, Any]) -> QuantizationConfig:
    """The configuration to quantize with.

    Args:
        trained: What the checkpoint was trained for, if it was.
        given: Fields of the configuration that the user named.

    Returns:
        What it was trained for, else what was given.

    Raises:
        ConfigError: The two contradict each other, or a field breaks a rule.
    """
    if trained is None:
        return validated(QuantizationConfig, **given)
    asked = validated(QuantizationConfig, **{**trained.model_dump(), **given})
    for field in QuantizationConfig.model_fields:
        if getattr(asked, field) != getattr(trained, field):
            raise ConfigError(
                f"{field}={getattr(asked, field)!r}: the checkpoint was trained for {getattr(trained, field)!r}; "
                "leave it out to quantize on the grid it was trained for."
            )
    return asked
