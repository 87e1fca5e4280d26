"""int8 keys and values."""

import jax
import numpy as np
import pytest
import torch

from llmq.quant import quantize_vectors


def test_every_vector_has_a_scale_of_its_own() -> None:
    sizes = np.array([1e-20, 1, 1e20], np.float32)[:, None]
    x = np.random.default_rng(0).standard_normal((5, 3, 64)).astype(np.float32) * sizes
    values, scale = quantize_vectors(x)
    assert (values.dtype, values.shape, scale.dtype, scale.shape) == (np.int8, x.shape, np.float32, (5, 3))
    assert (np.abs(values).max(axis=-1) == 127).all()
    restored = values * scale[..., None]
    assert (np.abs(restored - x) <= scale[..., None] * 0.5001).all()
    assert np.linalg.norm(restored[:, 1] - x[:, 1]) / np.linalg.norm(x[:, 1]) == pytest.approx(0.0066, abs=0.0008)


def test_a_zero_vector_stays_zero_in_every_framework() -> None:
    zero = np.zeros((2, 8), np.float32)
    for framework in (quantize_vectors, lambda x: quantize_vectors(torch.from_numpy(x)), jax.jit(quantize_vectors)):
        values, scale = framework(zero)
        assert not np.asarray(values).any()
        assert not np.asarray(scale).any()


def test_frameworks_agree_but_for_edges() -> None:
    x = np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32)
    ours, scale = quantize_vectors(x)
    for values, other in (quantize_vectors(torch.from_numpy(x)), jax.jit(quantize_vectors)(x)):
        np.testing.assert_array_equal(np.asarray(other), scale)
        assert np.abs(np.asarray(values).astype(int) - ours).max() <= 1
        assert (np.asarray(values) != ours).mean() < 1e-3
