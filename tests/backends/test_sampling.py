"""The sampler against a slow one in float64, in NumPy, torch and jitted JAX."""


import numpy as np

from llmq.backends.base import SlotSampling

#: Sums of probabilities err by this much, relative to all: two sums of at most 256 terms, the odds
#: of each within a few units in the last place, once in the threshold and once in the choice.
SLACK = 2048 * 2.0**-24


def adjusted(logits, rules: SlotSampling, prompt, answer, allowed) -> np.ndarray:
    """Bias, mask and penalties, token by token."""
    out = []
    for token, logit in enumerate(np.asarray(logits, np.float64)):
        value = logit + rules.logit_bias.get(token, 0.0)
        if not (int(allowed[token // 32]) >> (token % 32)) & 1:
            value = -np.inf
        if token in prompt or token in answer:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        if token in answer:
            value -= rules.presence_penalty
        out.append(value - rules.frequency_penalty * answer.count(token))
    return np.array(out)


def distribution(values: np.ndarray, rules: SlotSampling, slack: float = 0.0) -> np.ndarray:
    """Probabilities in float64, by a full sort; `slack` moves the thresholds of top_p and min_p."""
    with np.errstate(over="ignore"):
        odds = np.exp((values - values.max()) / rules.temperature)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if 0 < rules.top_k < len(values):
        odds[values < values[order[rules.top_k - 1]]] = 0
    if rules.top_p < 1:
        wanted, mass = (rules.top_p + slack) * odds.sum(), 0.0
        for token in order:
            mass += odds[token]
            if mass >= wanted:
                odds[values < values[token]] = 0
                break
    odds[odds < rules.min_p * (1 + slack)] = 0
    return odds / odds.sum()


def expected_token(logits, rules: SlotSampling, prompt, answer, allowed, uniform: float) -> int:
    """The token that the definition gives."""
    values = adjusted(logits, rules, set(np.asarray(prompt).tolist()), list(answer), allowed)
    if rules.temperature == 0:
        return int(values.argmax())
    return int(np.argmax(np.cumsum(distribution(values, rules)) > float(uniform)))
