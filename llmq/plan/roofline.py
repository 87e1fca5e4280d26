"""How fast a chip can be at most.

A step takes ``max(bytes / bandwidth, operations / rate)``: what it reads of weights and cache, what
it multiplies. Of experts a token multiplies by those that it chooses, and a step reads those that any token
chooses, as many as there are when all are equally likely. Weight-only schemes widen codes to bfloat16 before they multiply, so all have that
rate. Nothing else counts: no collectives, no launch, no sampling. No program is faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmq.checkpoint.coverage import TensorPlan
from llmq.model.config import ModelConfig
from llmq.model.names import EMBEDDING, Kind, is_expert
from llmq.model.shards import share
from llmq.plan.chips import Chip
from llmq.plan.memory import ITEM_BYTES

#: int4 is said to pay as long as it makes a step shorter by this part.
WORTH_IT = 0.05

#: Batches beyond this are not looked at.
MAX_BATCH = 1 << 16


def device_bytes(row: TensorPlan, config: ModelConfig, tp: int = 1) -> float:
    """What one device holds of a tensor: codes as they are stored, the rest in bfloat16.

    Args:
        row: The tensor.
        config: The model.
        tp: Devices that share it.

    Returns:
        Bytes.
    """
    if row.kind is None:
        return 0.0
    whole = row.stored_bytes if row.scheme else math.prod(row.shape) * ITEM_BYTES["bfloat16"]
    return whole * share(row.name, row.kind, config, tp)


@dataclass(frozen=True, slots=True)
class Roofline:
    """What bounds the steps of a model on a chip.

    Attributes:
        chip: Its rates.
        weight_bytes: Read in every step, on one device.
        matrix_ops: Operations of a token in linears and head, on one device.
        cache_bytes: Read for a cached position, on one device.
        attention_ops: Operations for a cached position, on one device.
        num_replicas: Groups of devices that each hold the model.
        expert_bytes: Of all experts, on one device; beside `weight_bytes`.
        chosen: The part of the experts that a token chooses.
    """

    chip: Chip
    weight_bytes: float
    matrix_ops: float
    cache_bytes: float
    attention_ops: float
    num_replicas: int
    expert_bytes: float = 0.0
    chosen: float = 1.0

    def step(self, batch: float, context: float) -> float:
        """Seconds of a decode step of one group of devices.

        Args:
            batch: Sequences.
            context: Cached positions of each.

        Returns:
            Seconds.
        """
        read = self._weights_read(batch) + batch * context * self.cache_bytes
        ops = batch * (self.matrix_ops + context * self.attention_ops)
        return max(read / self.chip.bandwidth, ops / self.chip.bf16_rate)

    def decode_rate(self, batch: int, context: float) -> float:
        """Tokens a second.

        Args:
            batch: Sequences, over all devices.
            context: Cached positions of each.

        Returns:
            Of all sequences together.
        """
        used = min(batch, self.num_replicas)
        return batch / self.step(batch / used, context)

    def prefill_rate(self, length: int) -> float:
        """Tokens a second of one prompt after the other on each group of devices.

        Args:
            length: Of a prompt.

        Returns:
            Of all devices together.
        """
        ops = length * (self.matrix_ops + length / 2 * self.attention_ops)
        read = self._weights_read(length) + length * self.cache_bytes
        return self.num_replicas * length / max(read / self.chip.bandwidth, ops / self.chip.bf16_rate)

    def _weights_read(self, num_tokens: float) -> float:
        """Bytes of the weights that some of so many tokens needs."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.chosen) ** num_tokens)


def roofline(
    rows: Sequence[TensorPlan], config: ModelConfig, chip: Chip, token_bytes: int, tp: int, num_replicas: int
) -> Roofline:
    """The bounds of a model.

    Args:
        rows: Its tensors.
        config: Its description.
        chip: Where it runs.
        token_bytes: Keys and values of a position.
        tp: Devices that compute a layer together.
        num_replicas: Groups of such devices.

    Returns:
        The bounds.
    """
    looked_up = {EMBEDDING} if not config.tie_embeddings else set[str]()
    matrices = [row for row in rows if row.kind in (Kind.LINEAR, Kind.LM_HEAD, Kind.EMBEDDING)]
    experts = config.experts
    chosen = experts.num_chosen / experts.num_experts if experts else 1.0
    read = {row.name: device_bytes(row, config, tp) for row in rows if row.name not in looked_up}
    expert_bytes = sum(num_bytes for name, num_bytes in read.items() if is_expert(name))
    sizes = {row.name: math.prod(row.shape) for row in matrices if row.name not in looked_up}
    multiplied = sum(size * (chosen if is_expert(name) else 1.0) for name, size in sizes.items())
    return Roofline(
        chip=chip,
        weight_bytes=sum(read.values()) - expert_bytes,
        matrix_ops=2 * multiplied / tp,
        cache_bytes=token_bytes / cache_parts(config, tp, shares_positions=chip.is_tpu),
        attention_ops=4 * config.num_layers * config.num_heads * config.head_dim / tp,
        num_replicas=num_replicas,
        expert_bytes=expert_bytes,
        chosen=chosen,
    )


def cache_parts(config: ModelConfig, tp: int, *, shares_positions: bool) -> int:
    """How many chips share a slot's keys and values.

    Args:
        config: The model.
        tp: Chips that compute a layer together.
        shares_positions: Whether those that share a head share its positions, as TPUs do; others hold each head whole.

    Returns:
        A count.
    """
    return tp if shares_positions else min(tp, config.num_kv_heads)


def last_batch_that_pays(narrow: Roofline, wide: Roofline, context: float) -> int:
    """The largest batch at which narrower weights still make a step shorter by `WORTH_IT`.

    Args:
        narrow: Of the quantized model.
        wide: Of the unquantized one, on the same devices.
        context: Cached positions of each sequence.

    Returns:
        Sequences on one group of devices; 0 when they never do, `MAX_BATCH` when always.
    """

    def pays(batch: int) -> bool:
        return narrow.step(batch, context) <= (1 - WORTH_IT) * wide.step(batch, context)

    low, high = 0, MAX_BATCH + 1  # it pays less and less: what is read for the cache and multiplied is the same
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
