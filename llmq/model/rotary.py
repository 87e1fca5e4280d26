"""Rotary position embedding: the frequencies, computed once in NumPy for every backend."""

import math

import numpy as np

from llmq.model.config import ModelConfig, Rotary


def rotary_frequencies(config: ModelConfig, rotary: Rotary | None = None) -> tuple[np.ndarray, float]:
    """Angular frequency of each rotated pair, and the factor on cos and sin.

    Args:
        config: Uses `head_dim` and `max_positions`.
        rotary: Which of its position embeddings; None is `config.rotary`.

    Returns:
        float32 `[head_dim / 2]` radians per position, and the attention factor (1 but for yarn).
        Pair j rotates the features j and j + head_dim / 2.

    Source:
        llama3: Llama 3.1 reference, ``apply_scaling``. yarn: arXiv:2309.00071, section 3.2-3.4.
    """
    rotary, dim = rotary or config.rotary, config.head_dim
    inverse = 1.0 / (rotary.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim))
    factor = 1.0
    if rotary.kind == "linear":
        inverse = inverse / rotary.factor
    elif rotary.kind == "llama3":
        inverse = _blend_llama3(inverse, config, rotary)
    elif rotary.kind == "yarn":
        inverse = _blend_yarn(inverse, config, rotary)
        factor = rotary.attention_factor or (0.1 * math.log(rotary.factor) + 1.0 if rotary.factor > 1 else 1.0)
    return inverse.astype(np.float32), factor


def rotary_tables(config: ModelConfig, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine for positions 0 .. `num_positions` - 1.

    Args:
        config: The model.
        num_positions: Rows of the tables.

    Returns:
        Two float32 arrays `[A, num_positions, head_dim / 2]`, a table for each of `config.attentions`.
    """
    tables = [rotary_frequencies(config, attention.rotary) for attention in config.attentions]
    positions = np.arange(num_positions, dtype=np.float32)
    angles = [(np.outer(positions, inverse), np.float32(factor)) for inverse, factor in tables]
    return np.stack([np.cos(a) * factor for a, factor in angles]), np.stack(
        [np.sin(a) * factor for a, factor in angles]
    )


def _blend_llama3(inverse: np.ndarray, config: ModelConfig, rotary: Rotary) -> np.ndarray:
    context = rotary.original_max_positions or config.max_positions
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * inverse / rotary.factor + smooth * inverse


def _blend_yarn(inverse: np.ndarray, config: ModelConfig, rotary: Rotary) -> np.ndarray:
    dim = config.head_dim
    context = rotary.original_max_positions or config.max_positions

    def pair_of(num_rotations: float) -> float:
        return dim * math.log(context / (num_rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low = max(math.floor(pair_of(rotary.beta_fast)), 0)
    high = min(math.ceil(pair_of(rotary.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return inverse / rotary.factor * ramp + inverse * (1 - ramp)
