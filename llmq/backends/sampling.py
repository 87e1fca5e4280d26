"""From logits to tokens: the rules of `base.SlotSampling`, written once for every backend.

    logits -> bias, mask, penalties -> temperature -> top_k, top_p, min_p -> the first id whose
    cumulative probability exceeds  uniform * total

Against the array API standard, so that NumPy, torch and jitted JAX run these lines; shapes are
static and nothing waits for the device. A rule that no slot uses may be left out (None): at its
neutral value it changes no bit, so a slot never depends on what its neighbours ask for.

`top_k` and `top_p` keep every token whose logit reaches a threshold, so tokens tied at the
threshold are kept together, whatever their number. The threshold is found without a sort, by
bisection over the logits' bits, which are ordered like the logits (`_ordered`).

Sums over the vocabulary are taken in blocks: their rounding then grows with the number of blocks
and the size of one, not with the vocabulary. A token of probability zero is never chosen,
however sums round.

Suffixes: S slots, V vocabulary, W words of 32 tokens, B blocks, b tokens a block, N tokens reported.
"""

from typing import Any, NamedTuple

import array_api_compat as aac
import numpy as np

from llmq.backends.base import MAX_TOP_LOGPROBS, SlotSampling
from llmq.quant.qtensor import Array

_BLOCK = 256

#: Below every logit's key.
_TAKEN = -(1 << 31)


class Rules(NamedTuple):
    """How each slot's tokens are chosen. A field of None is left out.

    Attributes:
        temperature_S: float32; 0 takes the most likely token.
        top_k_S: int32; 0 keeps all.
        top_p_S: float32.
        min_p_S: float32.
        repetition_S: float32, with `presence_S` and `frequency_S`: all three or none.
        presence_S: float32.
        frequency_S: float32.
        bias_SV: float32.
    """

    temperature_S: Array
    top_k_S: Array | None = None
    top_p_S: Array | None = None
    min_p_S: Array | None = None
    repetition_S: Array | None = None
    presence_S: Array | None = None
    frequency_S: Array | None = None
    bias_SV: Array | None = None


class Seen(NamedTuple):
    """Which tokens each slot holds.

    Attributes:
        prompt_SV: bool, whether the prompt holds a token.
        answer_SV: int32, how often the answer holds it.
    """

    prompt_SV: Array
    answer_SV: Array


def greedy(logits_SV: Array) -> Array:
    """The most likely token of each slot, the lowest id of a tie.

    Args:
        logits_SV: float32.

    Returns:
        int32 `[S]`; -1 where a logit is NaN or +inf, or all are -inf.
    """
    xp = aac.array_namespace(logits_SV)
    token_S, _, valid_S = _best(xp, logits_SV)
    return _tokens(xp, valid_S, token_S)


def sample(
    logits_SV: Array, uniform_S: Array, rules: Rules, seen: Seen | None = None, allowed_SW: Array | None = None
) -> Array:
    """Choose each slot's next token.

    Args:
        logits_SV: float32.
        uniform_S: float32 in [0, 1).
        rules: How.
        seen: For the penalties; None when `rules` has none.
        allowed_SW: int32 words, bit ``v % 32`` of word ``v // 32`` allows token v; None allows all.

    Returns:
        int32 `[S]`; -1 where `greedy` gives it or no token is allowed.
    """
    xp = aac.array_namespace(logits_SV)
    adjusted_SV = _adjust(xp, logits_SV, rules, seen, allowed_SW)
    _, _, valid_S = _best(xp, logits_SV)
    best_S, highest_S, still_valid_S = _best(xp, adjusted_SV)
    valid_S = valid_S & still_valid_S
    at_zero_S = rules.temperature_S == 0
    divisor_S = xp.where(at_zero_S, 1.0, rules.temperature_S)
    below_SV = adjusted_SV - xp.where(valid_S, highest_S, 0.0)[:, None]
    odds_SV = xp.where(valid_S[:, None], xp.exp(below_SV / divisor_S[:, None]), 1.0)  # 1 for the most likely token
    sampled_S = _inverse(xp, _keep(xp, adjusted_SV, odds_SV, rules), uniform_S)
    return _tokens(xp, valid_S, xp.where(at_zero_S, best_S, sampled_S))


def log_probabilities(logits_SV: Array, token_S: Array) -> tuple[Array, Array, Array]:
    """How likely tokens are, before any rule.

    Args:
        logits_SV: float32.
        token_S: int32, what was chosen; -1 gives a number without meaning.

    Returns:
        float32 `[S]` of the chosen tokens; int32 `[S, N]` and float32 `[S, N]`, the most likely
        ones, best first, ties by lower id. N is `MAX_TOP_LOGPROBS`, at most V.
    """
    xp = aac.array_namespace(logits_SV)
    best_S1 = xp.max(logits_SV, axis=-1, keepdims=True)
    total_S = _total(xp, _blocks(xp, xp.exp(logits_SV - best_S1), 0.0))
    top_SN = _top(xp, logits_SV)
    ids_SN = xp.concat([xp.astype(xp.where(token_S < 0, 0, token_S), top_SN.dtype)[:, None], top_SN], axis=-1)
    logprobs_SN = xp.take_along_axis(logits_SV, ids_SN, axis=-1) - best_S1 - xp.log(total_S)[:, None]
    return logprobs_SN[:, 0], xp.astype(top_SN, xp.int32), logprobs_SN[:, 1:]


def _best(xp: Any, logits_SV: Array) -> tuple[Array, Array, Array]:
    """The most likely token, its logit, and whether that is finite: argmax finds a NaN if there is one."""
    token_S = xp.argmax(logits_SV, axis=-1)
    highest_S = xp.take_along_axis(logits_SV, token_S[:, None], axis=-1)[:, 0]
    return token_S, highest_S, xp.isfinite(highest_S)


def _tokens(xp: Any, valid_S: Array, token_S: Array) -> Array:
    return xp.where(valid_S, xp.astype(token_S, xp.int32), -1)


def _adjust(xp: Any, logits_SV: Array, rules: Rules, seen: Seen | None, allowed_SW: Array | None) -> Array:
    if rules.bias_SV is not None:
        logits_SV = logits_SV + rules.bias_SV
    if allowed_SW is not None:
        logits_SV = xp.where(_bits(xp, allowed_SW, logits_SV), logits_SV, -xp.inf)
    if rules.repetition_S is None or rules.presence_S is None or rules.frequency_S is None:
        return logits_SV
    assert seen is not None
    count_SV = xp.astype(seen.answer_SV, xp.float32)
    repetition_S1 = rules.repetition_S[:, None]
    weakened_SV = xp.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    logits_SV = xp.where(seen.prompt_SV | (seen.answer_SV > 0), weakened_SV, logits_SV)
    presence_SV = xp.where(seen.answer_SV > 0, rules.presence_S[:, None], 0.0)
    return logits_SV - presence_SV - rules.frequency_S[:, None] * count_SV


def _bits(xp: Any, allowed_SW: Array, like_SV: Array) -> Array:
    shifts = xp.arange(32, dtype=xp.int32, device=aac.device(allowed_SW))
    bits = (allowed_SW[:, :, None] >> shifts) & 1
    return xp.reshape(bits, (like_SV.shape[0], -1))[:, : like_SV.shape[-1]] == 1


def _keep(xp: Any, logits_SV: Array, odds_SV: Array, rules: Rules) -> Array:
    """The odds of the tokens that top_k, top_p and min_p keep, 0 for the others; in blocks `[S, B, b]`."""
    num_tokens = logits_SV.shape[-1]
    key_SBb, odds_SBb = _blocks(xp, _ordered(xp, logits_SV), _TAKEN), _blocks(xp, odds_SV, 0.0)
    if rules.top_k_S is not None:
        all_S = (rules.top_k_S <= 0) | (rules.top_k_S >= num_tokens)
        wanted_S = xp.astype(xp.where(all_S, num_tokens, rules.top_k_S), xp.float32)
        least_S = _threshold(xp, key_SBb, xp.ones_like(odds_SBb), wanted_S)
        odds_SBb = odds_SBb * (key_SBb >= least_S[:, None, None])
    if rules.top_p_S is not None:
        wanted_S = rules.top_p_S * _total(xp, odds_SBb)
        least_S = xp.where(rules.top_p_S < 1, _threshold(xp, key_SBb, odds_SBb, wanted_S), _TAKEN)
        odds_SBb = odds_SBb * (key_SBb >= least_S[:, None, None])
    if rules.min_p_S is not None:
        odds_SBb = odds_SBb * (odds_SBb >= rules.min_p_S[:, None, None])
    return odds_SBb


def _ordered(xp: Any, array: Array) -> Array:
    """int32 keys in the order of the float32 values."""
    bits = array.view(xp.int32) * (array != 0)  # -0 equals +0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _threshold(xp: Any, key_SBb: Array, mass_SBb: Array, wanted_S: Array) -> Array:
    """The highest key such that tokens from it on have the wanted mass together."""
    low_S, high_S = xp.min(key_SBb, axis=(-2, -1)), xp.max(key_SBb, axis=(-2, -1)) + 1
    for _ in range(32):
        middle_S = (low_S & high_S) + ((low_S ^ high_S) >> 1)  # the mean, without overflow
        enough_S = _total(xp, mass_SBb * (key_SBb >= middle_S[:, None, None])) >= wanted_S
        low_S, high_S = xp.where(enough_S, middle_S, low_S), xp.where(enough_S, high_S, middle_S)
    return low_S


def _inverse(xp: Any, odds_SBb: Array, uniform_S: Array) -> Array:
    """The first id whose cumulative odds exceed `uniform` of all: first its block, then the id in it."""
    sums_SB = xp.sum(odds_SBb, axis=-1)
    ends_SB = xp.cumulative_sum(sums_SB, axis=-1, dtype=xp.float32)
    goal_S = uniform_S * ends_SB[:, -1]
    block_S1 = _first_over(xp, ends_SB, sums_SB, goal_S)[:, None]
    odds_Sb = xp.take_along_axis(odds_SBb, block_S1[:, :, None], axis=1)[:, 0]
    before_S1 = xp.take_along_axis(ends_SB - sums_SB, block_S1, axis=-1)
    ends_Sb = before_S1 + xp.cumulative_sum(odds_Sb, axis=-1, dtype=xp.float32)
    return block_S1[:, 0] * _BLOCK + _first_over(xp, ends_Sb, odds_Sb, goal_S)


def _first_over(xp: Any, ends: Array, odds: Array, goal_S: Array) -> Array:
    """The first entry that has odds and ends beyond the goal; the last that has odds, when rounding leaves none."""
    possible = odds > 0
    over = possible & (ends > goal_S[:, None])
    last_S = odds.shape[-1] - 1 - xp.argmax(xp.astype(xp.flip(possible, axis=-1), xp.int32), axis=-1)
    return xp.where(xp.any(over, axis=-1), xp.argmax(xp.astype(over, xp.int32), axis=-1), last_S)


def _top(xp: Any, logits_SV: Array) -> Array:
    """The ids of the highest logits. They lie in as many blocks, those with the highest maxima."""
    key_SBb = _blocks(xp, _ordered(xp, logits_SV), _TAKEN)
    num_slots, num_blocks, _ = key_SBb.shape
    block_Sn = xp.sort(_largest(xp, xp.max(key_SBb, axis=-1), min(MAX_TOP_LOGPROBS, num_blocks)), axis=-1)
    key_Snb = xp.take_along_axis(key_SBb, block_Sn[:, :, None], axis=1)
    place_SN = _largest(xp, xp.reshape(key_Snb, (num_slots, -1)), min(MAX_TOP_LOGPROBS, logits_SV.shape[-1]))
    return xp.take_along_axis(block_Sn, place_SN // _BLOCK, axis=-1) * _BLOCK + place_SN % _BLOCK


def _largest(xp: Any, key_Sn: Array, count: int) -> Array:
    """Indices of the largest keys, largest first, ties by lower index."""
    index_n = xp.arange(key_Sn.shape[-1], device=aac.device(key_Sn))
    found = []
    for _ in range(count):
        found.append(xp.argmax(key_Sn, axis=-1))
        key_Sn = xp.where(index_n == found[-1][:, None], _TAKEN, key_Sn)
    return xp.stack(found, axis=-1)


def _total(xp: Any, array_SBb: Array) -> Array:
    return xp.sum(xp.sum(array_SBb, axis=-1), axis=-1)


def _blocks(xp: Any, array_SV: Array, padding: float) -> Array:
    num_slots, num_tokens = array_SV.shape
    missing = -num_tokens % _BLOCK
    if missing:
        filler = xp.full((num_slots, missing), padding, dtype=array_SV.dtype, device=aac.device(array_SV))
        array_SV = xp.concat([array_SV, filler], axis=-1)
    return xp.reshape(array_SV, (num_slots, -1, _BLOCK))


class SlotRules:
    """The parameters of every slot, on the host.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [SlotSampling()] * num_slots

    def set(self, slot: int, sampling: SlotSampling) -> None:
        """Hand a slot to a request.

        Args:
            slot: Which.
            sampling: How to choose its tokens.
        """
        self._slots[slot] = sampling

    def all_greedy(self, active_S: np.ndarray) -> bool:
        """Whether `greedy` is all that some slots need.

        Args:
            active_S: bool, which.

        Returns:
            False when one has a temperature, a bias or a penalty.
        """
        return not any(slot.temperature > 0 or slot.logit_bias or _penalizes(slot) for slot in self._of(active_S))

    def has_bias(self, active_S: np.ndarray) -> bool:
        """Whether a slot biases tokens.

        Args:
            active_S: bool, which slots.

        Returns:
            False when no `Rules.bias_SV` is needed.
        """
        return any(slot.logit_bias for slot in self._of(active_S))

    def rules(self, active_S: np.ndarray) -> Rules:
        """The parameters as NumPy arrays.

        Args:
            active_S: bool, the slots whose tokens matter.

        Returns:
            Rows for all slots, without what no active slot uses, and without `Rules.bias_SV`.
        """
        active = self._of(active_S)
        penalties = any(map(_penalizes, active))
        return Rules(
            self._column("temperature"),
            self._column("top_k", np.int32) if any(slot.top_k for slot in active) else None,
            self._column("top_p") if any(slot.top_p < 1 for slot in active) else None,
            self._column("min_p") if any(slot.min_p for slot in active) else None,
            self._column("repetition_penalty") if penalties else None,
            self._column("presence_penalty") if penalties else None,
            self._column("frequency_penalty") if penalties else None,
        )

    def _of(self, active_S: np.ndarray) -> list[SlotSampling]:
        return [self._slots[slot] for slot in np.flatnonzero(active_S)]

    def _column(self, name: str, dtype: type = np.float32) -> np.ndarray:
        return np.array([getattr(slot, name) for slot in self._slots], dtype)


def _penalizes(slot: SlotSampling) -> bool:
    return (slot.repetition_penalty, slot.presence_penalty, slot.frequency_penalty) != (1.0, 0.0, 0.0)


def bias_row(sampling: SlotSampling, vocab_size: int) -> np.ndarray:
    """A slot's row of `Rules.bias_SV`.

    Args:
        sampling: Of the slot.
        vocab_size: V.

    Returns:
        float32 `[V]`.
    """
    row_V = np.zeros(vocab_size, np.float32)
    row_V[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
    return row_V


def prompt_row(prompt: np.ndarray, vocab_size: int) -> np.ndarray:
    """A slot's row of `Seen.prompt_SV`.

    Args:
        prompt: Token ids.
        vocab_size: V.

    Returns:
        bool `[V]`.
    """
    row_V = np.zeros(vocab_size, np.bool_)
    row_V[prompt] = True
    return row_V
