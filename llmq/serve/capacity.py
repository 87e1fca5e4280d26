"""How many slots of how much context a server takes; what fits is `llmq.plan.memory`'s."""

import math
from dataclasses import dataclass

from llmq.backends.base import ComputeType, Memory
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import ConfigError
from llmq.plan.memory import BYTES_PER_LOGIT, ITEM_BYTES, RESERVE, Room, bytes_per_token

#: Context below which a slot is of no use.
MIN_CONTEXT = 256

#: Context that default settings give up slots for.
PREFERRED_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is served.

    Attributes:
        num_slots: Sequences held at once.
        max_len: Positions of each.
        weight_bytes: Estimate for the device.
        free_bytes: Before loading.
    """

    num_slots: int
    max_len: int
    weight_bytes: int
    free_bytes: int


def weight_bytes(weights: ModelWeights, dtype: ComputeType) -> int:
    """Bytes of the weights on the device: codes as they are stored, the rest in the compute type.

    Args:
        weights: The model.
        dtype: Compute type.

    Returns:
        Bytes.
    """
    kept = [info for name, info in weights.reader.tensors.items() if name in weights and not weights.is_quantized(name)]
    stored = sum(info.num_bytes for info in weights.reader.tensors.values()) - sum(info.num_bytes for info in kept)
    return stored + sum(math.prod(info.shape) for info in kept) * ITEM_BYTES[dtype]


def plan_capacity(
    weights: ModelWeights,
    memory: Memory,
    *,
    dtype: ComputeType,
    kv_int8: bool,
    num_slots: int | None,
    max_len: int | None,
    default_slots: int,
    dp: int = 1,
    tp: int = 1,
    cache_parts: int = 1,
) -> Capacity:
    """Choose slots and context, or refuse what cannot fit.

    Args:
        weights: The model.
        memory: Of each device, before loading.
        dtype: Compute type.
        kv_int8: Store keys and values as int8.
        num_slots: As asked for; None chooses.
        max_len: As asked for; None chooses.
        default_slots: Wanted when nothing is asked for.
        dp: Groups of devices, which share the slots.
        tp: Devices of a group, which share weights.
        cache_parts: How many of them share a slot's keys and values.

    Returns:
        The plan.

    Raises:
        ConfigError: It does not fit, or is out of range; names the largest that would fit.
    """
    config = weights.config
    context = config.max_positions
    if num_slots is not None and num_slots < 1:
        raise ConfigError(f"max_num_seqs={num_slots}: must be at least 1.")
    if max_len is not None and not 0 < max_len <= context:
        raise ConfigError(f"max_model_len={max_len}: must be positive and at most the model's context, {context}.")
    each = math.ceil(bytes_per_token(config, "int8" if kv_int8 else dtype) / cache_parts)
    slot_bytes = config.vocab_size * BYTES_PER_LOGIT
    taken = math.ceil(weight_bytes(weights, dtype) / tp)
    room = Room(int(memory.free * (1 - RESERVE)) - taken, each, slot_bytes, context)
    smallest = min(context, MIN_CONTEXT)
    if room.num_sequences(smallest) == 0:
        raise ConfigError(
            f"memory: {_gb(memory.free)} are free, but the weights take {_gb(taken)} and the smallest cache "
            f"{_gb(smallest * each + slot_bytes)}; use a smaller model or scheme."
        )
    if max_len is None:
        length = room.context(math.ceil((num_slots or default_slots) / dp))
        if num_slots is None:
            length = max(length, min(context, PREFERRED_CONTEXT, room.context(1)))
        elif length < smallest:
            raise _too_large(f"max_num_seqs={num_slots}", room.num_bytes, dp * room.num_sequences(smallest), 0)
    else:
        length = max_len
    most = dp * room.num_sequences(length)
    slots = min(default_slots, most) if num_slots is None else num_slots
    if not 0 < slots <= most:
        asked = f"max_model_len={length}" if num_slots is None else f"max_num_seqs={slots} and max_model_len={length}"
        raise _too_large(asked, room.num_bytes, most, room.context(math.ceil(slots / dp) or 1))
    return Capacity(slots, length, taken, memory.free)


def _too_large(asked: str, room: int, num_slots: int, length: int) -> ConfigError:
    """Names the slots, or the context, that would fit; 0 for what would not help."""
    ways = [f"--max-num-seqs {num_slots}"] * bool(num_slots) + [f"--max-model-len {length}"] * bool(length)
    largest = " or ".join(ways) or "--kv-cache-dtype int8, or less of both,"
    return ConfigError(f"{asked}: the cache exceeds the {_gb(room)} left for it; at most {largest} fits.")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
