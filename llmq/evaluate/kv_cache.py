"""What quantized keys and values cost, apart from the weights.

Text can stay fluent while a quantized cache wrecks a model, as where attention leans on a few large
keys. So the same weights are run with both caches, and what they predict is compared.
"""

from dataclasses import replace

from llmq.evaluate.measured import Measured
from llmq.evaluate.subject import Subject

#: Of the metrics of such a comparison.
GROUP = "kv_cache"

#: Mean KL in nats that a quantized cache may cost. SmolLM2-135M loses 0.0024 to an int8 cache; eight times
#: that is no rounding any more.
MAX_KL = 0.02


def unquantized(subject: Subject) -> Subject:
    """The same model, with keys and values in the compute type.

    Args:
        subject: A model.

    Returns:
        It, not opened yet.
    """
    return replace(subject, options=replace(subject.options, kv_int8=False))


def warning(measured: Measured, group: str = GROUP) -> str | None:
    """What people should know of a comparison with the unquantized cache.

    Args:
        measured: The comparison.
        group: Of its metrics.

    Returns:
        A sentence, if it costs more than `MAX_KL`.
    """
    kl = measured.metrics[f"{group}/kl_mean"].value
    if kl <= MAX_KL:
        return None
    return (
        f"warning: the int8 KV cache changes this model's predictions by {kl:.3g} nats (mean KL), more than the "
        f"{MAX_KL} that rounding explains; leave out --kv-cache-dtype int8"
    )
