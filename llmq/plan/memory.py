"""What fits.

memory * (1 - RESERVE)  >=  weights + sequences * (context * bytes_per_token + vocab_size * BYTES_PER_LOGIT)
"""

from dataclasses import dataclass
from types import MappingProxyType

from llmq.model.config import ModelConfig

#: Part of the memory that is left for activations, the compiler and fragmentation.
RESERVE = 0.1

#: Contexts are cut to multiples of this.
_ROUND = 64

#: float32 logits, their copies while sampling, counts for penalties.
BYTES_PER_LOGIT = 32

#: Type -> bytes of an element.
ITEM_BYTES: MappingProxyType[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1})


def bytes_per_token(config: ModelConfig, kv_dtype: str) -> int:
    """Keys and values of one position, over all layers.

    Args:
        config: The model.
        kv_dtype: As stored, a key of `ITEM_BYTES`; int8 has a float32 scale per head.

    Returns:
        Bytes.
    """
    head = config.head_dim * ITEM_BYTES[kv_dtype] + (4 if kv_dtype == "int8" else 0)
    return 2 * config.num_layers * config.num_kv_heads * head


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that is left for sequences, and what one takes.

    Attributes:
        num_bytes: Left beside the weights; negative when they do not fit.
        token_bytes: Of a position.
        sequence_bytes: Of a sequence, whatever its context.
        max_positions: The model's context.
    """

    num_bytes: int
    token_bytes: int
    sequence_bytes: int
    max_positions: int

    def num_sequences(self, context: int) -> int:
        """How many sequences of a context fit.

        Args:
            context: Positions of each.

        Returns:
            A count.
        """
        return max(0, self.num_bytes // (context * self.token_bytes + self.sequence_bytes))

    def context(self, num_sequences: int) -> int:
        """The longest context of which so many sequences fit.

        Args:
            num_sequences: At least 1.

        Returns:
            Positions; 0 when not even the smallest fits.
        """
        left = self.num_bytes // num_sequences - self.sequence_bytes
        length = min(self.max_positions, max(0, left) // self.token_bytes)
        return length if length == self.max_positions else length - length % _ROUND
