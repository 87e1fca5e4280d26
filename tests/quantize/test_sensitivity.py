"""The table against quantizing one stage by itself."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from llmq.backends import reference
from llmq.backends.base import ModelOptions
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import SCHEMES, QuantizationConfig
from llmq.quant import dequantize, quantize
from llmq.quantize.options import ALGORITHMS
from llmq.quantize.sensitivity import TABLE, measure_sensitivity
from tests.tiny import write_tiny


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_the_coarsest_choice_is_measured_and_the_others_follow_their_errors(tmp_path: Path, backend: str) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2)))
    rng = np.random.default_rng(0)
    sequences, heldout = (
        [rng.integers(3, 320, n).astype(np.int32) for n in lengths] for lengths in ((40, 50), (30, 9))
    )
    options = ModelOptions(device="cpu", dtype="float32", max_len=64)
    calibrator = load_backend(backend).open_calibrator(weights, options, 2)
    config = QuantizationConfig(scheme="int4_blockwise")
    with ThreadPoolExecutor(2) as pool:
        table = measure_sensitivity(calibrator, weights, config, ALGORITHMS["rtn"], sequences, heldout, pool)
    assert len(table) == 8
    assert TABLE.validate_python(TABLE.dump_python(table, mode="json")) == table
    for row in table:
        names = [(c.scheme, c.group_size) for c in row.candidates]
        sizes = (128, 64, 32)
        assert names == [*(("int4_blockwise", g) for g in sizes), ("int8_per_channel", None), ("none", None)]
        assert (np.diff([c.num_bytes for c in row.candidates]) > 0).all()
        assert (np.diff([c.kl for c in row.candidates]) < 0).all()
        assert row.candidates[-1].kl == 0.0
        errors = [sum(c.output_error.values()) for c in row.candidates]
        assert [c.kl for c in row.candidates] == pytest.approx([row.candidates[0].kl * e / errors[0] for e in errors])

    changed = {f"{linear}.weight" for linear in table[6].linears}  # gate and up of the second block

    class OneStage(ModelWeights):
        def __getitem__(self, name: str) -> np.ndarray:
            weight = super().__getitem__(name)
            scheme = SCHEMES["int4_blockwise"].model_copy(update={"group_size": 128})
            return dequantize(quantize(weight, scheme)) if name in changed else weight

    kls = []
    for sequence in heldout:
        p, q = (
            logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            for logits in (reference.forward(w, sequence.tolist()) for w in (weights, OneStage(weights.reader)))
        )
        kls.append((np.exp(p) * (p - q)).sum(axis=-1))
    assert table[6].candidates[0].kl == pytest.approx(np.concatenate(kls).mean(), rel=1e-3)
