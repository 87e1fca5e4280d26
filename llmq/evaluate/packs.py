"""Scoring many continuations with little computing: what they share is computed once.

Requests with the same context form a group, and groups are taken in the order of their contexts'
token ids, so that each begins like the one before it. One call of the backend holds one group
or several, behind the beginning that all of them share:

    slot      the beginning, written once and kept for the calls after it
    parents   the rest of each context but its last token
    runs      [last context token] + continuation[:-1]      targets = continuation

A few-shot primer is so computed once for all items, and a context once for all its continuations.
Calls are cut by tokens, so memory is bounded. Attention is quadratic in a call's tokens.

Which tokens are computed together depends on the requests alone, not on which of them are answered
already: a run that was interrupted goes on to the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmq.errors import ConfigError

#: `tokens_per_call` at most. SmolLM2-135M on a CPU: hellaswag takes 4.2 s with 192, 4.5 s with 256, 5.1 s with
#: 512 and 7.0 s with 1024; attention is quadratic.
MAX_TOKENS_PER_CALL = 256
MIN_TOKENS_PER_CALL = 64

#: A call takes as long as computing about this many tokens does. So many are written into the slot
#: at least, with a call of their own; fewer are computed anew for each context of a call.
_CALL_COST = 32

#: Copies of a call's float32 logits alive at once, generously.
_LOGITS_COPIES = 4


class Request(NamedTuple):
    """What to score.

    Attributes:
        context: Token ids, at least one.
        continuation: Token ids, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call of a backend may hold.

    Attributes:
        tokens: Tokens to compute.
        runs: Continuations; None leaves it to `tokens`.
    """

    tokens: int
    runs: int | None = None


def tokens_per_call(vocab_size: int, memory_bytes: int) -> int:
    """How many tokens to compute at once: their logits may take a sixteenth of the memory.

    Args:
        vocab_size: Logits of a token.
        memory_bytes: Of the machine.

    Returns:
        A power of two, so that small differences between machines change nothing.
    """
    fitting = memory_bytes // 16 // (vocab_size * 4 * _LOGITS_COPIES)
    floor = 1 << max(fitting, 1).bit_length() - 1
    return min(max(floor, MIN_TOKENS_PER_CALL), MAX_TOKENS_PER_CALL)


def fit(request: Request, max_length: int) -> Request:
    """Cut a context from the left until the request fits, as lm-eval does.

    The last token of a continuation is only a target, so context and continuation together may have
    one token more than the model has positions.

    Args:
        request: Of any length.
        max_length: Positions of the model.

    Returns:
        The request, with the end of its context.

    Raises:
        ConfigError: The context or the continuation is empty, or the continuation alone does not fit.
    """
    context, continuation = request
    if not context or not continuation:
        raise ConfigError("prompt: its context or its continuation has no tokens, so there is nothing to score.")
    if len(continuation) > max_length:
        raise ConfigError(
            f"max_model_len={max_length}: a continuation has {len(continuation)} tokens; raise --max-model-len or leave out the task."
        )
    return Request(context[-(max_length + 1 - len(continuation)) :], continuation)


class Group(NamedTuple):
    """Requests with the same context.

    Attributes:
        context: Token ids.
        continuations: Each one's token ids, the longest first.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]


class Pack(NamedTuple):
    """Groups that are computed together.

    Attributes:
        prefix: What the slot holds: the beginning of every context, without its last token.
        groups: One or more in one call; a group too large for one call is alone, and the slot holds
            all of its context but the last token.
    """

    prefix: tuple[int, ...]
    groups: tuple[Group, ...]


def plan(requests: Sequence[Request], limits: Limits, max_len: int) -> Iterator[Pack]:
    """Decide what is computed together.

    Args:
        requests: Each fits the model, see `fit`. Equal ones count once.
        limits: What one call may hold.
        max_len: Positions of the slot.

    Yields:
        Packs, in the order in which the slot is to hold their prefixes.
    """
    found: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for context, continuation in requests:
        found.setdefault(context, {})[continuation] = None
    groups = [
        Group(context, tuple(sorted(found[context], key=lambda tokens: (-len(tokens), tokens))))
        for context in sorted(found)
    ]
    held: tuple[int, ...] = ()
    start = 0
    while start < len(groups):
        pack = _next_pack(groups, start, held, limits, max_len)
        yield pack
        held = pack.prefix
        start += len(pack.groups)


def _next_pack(groups: list[Group], start: int, held: tuple[int, ...], limits: Limits, max_len: int) -> Pack:
    first = groups[start].context[:-1]
    num_held = num_shared(held, first)
    following = groups[start + 1].context[:-1] if start + 1 < len(groups) else ()
    num_prefix = _num_prefix(max(num_shared(first, following), num_held), num_held)
    common, num_tokens, num_runs, end = len(first), 0, 0, start
    for group in groups[start:]:
        context, continuations = group
        common = num_shared(first[:common], context[:-1])
        shorter = num_prefix if end == start else _num_prefix(common, min(num_held, common))
        num_tokens += len(context) - 1 + sum(map(len, continuations))
        num_runs += len(continuations)
        computed = num_tokens - (end + 1 - start) * shorter
        if (
            computed > min(limits.tokens, max_len - shorter)
            or num_runs > (limits.runs or num_runs)
            or shorter <= num_prefix - _CALL_COST
        ):
            break
        num_prefix = shorter
        end += 1
    if end == start:
        return Pack(first, (groups[start],))
    return Pack(first[:num_prefix], tuple(groups[start:end]))


def _num_prefix(common: int, num_held: int) -> int:
    """How much of a shared beginning to hold, if so much of it is held already."""
    return common if common - num_held >= _CALL_COST else num_held


def num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Count the tokens that both begin with.

    Args:
        one: Token ids.
        other: Token ids.

    Returns:
        How many.
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
