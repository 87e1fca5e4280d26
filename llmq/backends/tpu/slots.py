"""What each slot writes next, and how the token after it is chosen; all of it stays on the device.

A step is three programs: `model.decode` gives logits, `take_likeliest` or `take_sampled` chooses from
them, and `log_probabilities` reports on them. So what is asked of one slot does not change which
program computes another's numbers: only the most likely token has two, and it comes of comparisons.

Suffixes: S slots, V vocabulary, W words of 32 tokens.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmq.backends import sampling
from llmq.backends.base import SlotSampling
from llmq.backends.sampling import Rules, Seen
from llmq.backends.tpu.linear import Leaf


class Next(NamedTuple):
    """What each slot writes next.

    Attributes:
        token_S: int32.
        position_S: int32.
    """

    token_S: Leaf
    position_S: Leaf


class Slots(NamedTuple):
    """Of every slot, or of the one that is handed over.

    Attributes:
        following: What it writes.
        rules: How its tokens are chosen.
        seen: What it holds.
    """

    following: Next
    rules: Rules
    seen: Seen


def empty_slots(num_slots: int, vocab_size: int) -> Slots:
    """Slots that nobody was handed.

    Args:
        num_slots: S.
        vocab_size: V.

    Returns:
        All of them.
    """
    rules = jax.tree.map(
        lambda rule: jnp.zeros((num_slots, *np.shape(rule)), rule.dtype), _rules_of(SlotSampling(), vocab_size)
    )
    seen = Seen(jnp.zeros((num_slots, vocab_size), bool), jnp.zeros((num_slots, vocab_size), jnp.int32))
    return Slots(Next(jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, jnp.int32)), rules, seen)


def request(prompt: np.ndarray, params: SlotSampling, vocab_size: int) -> Slots:
    """What `hand_over` puts into a slot.

    Args:
        prompt: int32 `[n]`.
        params: How to choose what follows.
        vocab_size: V.

    Returns:
        One slot, in NumPy.
    """
    following = Next(np.int32(prompt[-1]), np.int32(len(prompt) - 1))
    seen = Seen(np.bincount(prompt, minlength=vocab_size) > 0, np.int32(0))
    return Slots(following, _rules_of(params, vocab_size), seen)


def _rules_of(params: SlotSampling, vocab_size: int) -> Rules:
    bias_V = np.zeros(vocab_size, np.float32)
    bias_V[list(params.logit_bias)] = list(params.logit_bias.values())
    return Rules(
        temperature_S=np.float32(params.temperature),
        top_k_S=np.int32(params.top_k),
        top_p_S=np.float32(params.top_p),
        min_p_S=np.float32(params.min_p),
        repetition_S=np.float32(params.repetition_penalty),
        presence_S=np.float32(params.presence_penalty),
        frequency_S=np.float32(params.frequency_penalty),
        bias_SV=bias_V,
    )


@partial(jax.jit, donate_argnames="slots")
def hand_over(slots: Slots, slot: Leaf, new: Slots) -> Slots:
    """Hand a slot to a request.

    Args:
        slots: Donated.
        slot: Which, a scalar.
        new: From `request`.

    Returns:
        All slots.
    """
    return jax.tree.map(lambda all_S, one: all_S.at[slot].set(one), slots, new)


@jax.jit
def take_likeliest(following: Next, logits_SV: jax.Array, active_S: Leaf) -> tuple[Next, jax.Array]:
    """Choose where nothing but the most likely token is asked for.

    Args:
        following: What was written.
        logits_SV: float32.
        active_S: bool.

    Returns:
        What to write next, and the tokens, int32 `[S]`.
    """
    token_S = sampling.greedy(logits_SV)
    return _advance(following, token_S, active_S), token_S


@partial(jax.jit, donate_argnames="seen")
def take_sampled(
    following: Next,
    rules: Rules,
    seen: Seen,
    logits_SV: jax.Array,
    active_S: Leaf,
    uniform_S: Leaf,
    allowed_SW: Leaf,
) -> tuple[Next, Seen, jax.Array]:
    """Choose by every rule there is; one that a slot does not use changes none of its bits.

    Args:
        following: What was written.
        rules: Of each slot.
        seen: Donated.
        logits_SV: float32.
        active_S: bool.
        uniform_S: float32 in [0, 1).
        allowed_SW: int32 words of a bit for each token.

    Returns:
        What to write next, what the slots hold with it, and the tokens, int32 `[S]`.
    """
    token_S = sampling.sample(logits_SV, uniform_S, rules, seen, allowed_SW)
    counted_S = active_S & (token_S >= 0)
    answer_SV = seen.answer_SV.at[jnp.arange(len(token_S)), token_S].add(counted_S.astype(jnp.int32))
    return _advance(following, token_S, active_S), seen._replace(answer_SV=answer_SV), token_S


log_probabilities = jax.jit(sampling.log_probabilities)


def _advance(following: Next, token_S: jax.Array, active_S: Leaf) -> Next:
    return Next(
        jnp.where(active_S, token_S, following.token_S),
        jnp.where(active_S, following.position_S + 1, following.position_S),
    )
