"""Whole models through the TPU compiler, and what is read off its programs."""

import json
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from llmq.backends.base import ModelOptions
from llmq.backends.tpu import aot
from llmq.backends.tpu.linear import EinsumLinear
from llmq.config import QuantizationConfig
from llmq.errors import BackendError, ConfigError
from llmq.plan.memory import bytes_per_token
from llmq.plan.run import PlanOptions, make_plan
from llmq.plan.subject import read_subject
from tests.commands.test_cli import refused
from tests.plan.test_plan import LLAMA_2_7B, LLAMA_3_8B
from tests.tiny import GEMMA3, tiny_config

GIB = 1 << 30
needs_compiler = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'llmq[tpu]'")


def described(path: Path, config: dict) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


class TestWhatIsRead:
    def test_collectives(self) -> None:
        text = """
%region_1.spmd (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce.1 = f32[8,16]{1,0} all-reduce(f32[8,16]{1,0} %x), replica_groups={}
  %all-reduce-start.2 = f32[8]{0} all-reduce-start(f32[8]{0} %all-reduce.1)
  %all-reduce-done.2 = f32[8]{0} all-reduce-done(f32[8]{0} %all-reduce-start.2)
}
ENTRY %main (x: f32[8]) -> bf16[4] {
  %all-reduce.3 = f32[8,16]{1,0} all-reduce(f32[8,16]{1,0} %x), replica_groups={}
  ROOT %g = bf16[4]{0} all-gather(bf16[2]{0} %y)
}
"""
        assert aot.collectives(text) == {"all-reduce a layer": 2, "all-reduce": 1, "all-gather": 1}

    def test_by_how_much_it_does_not_fit(self) -> None:
        message = (
            "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (20.50G) exceeds available HBM (15.75G)."
        )
        assert aot.exceeded(message) == 4.75 * GIB
        assert aot.exceeded("INTERNAL: Mosaic failed") is None

    def test_a_weight_that_is_written_out(self) -> None:
        text = """
%fused_computation.1 (p: s4[64,64]) -> bf16[64,64] {
  %convert.9 = bf16[64,64]{1,0} convert(s4[64,64]{1,0} %p)
}
ENTRY %main (a: s4[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %small = f32[64,8]{1,0} convert(f32[64,8]{1,0} %x)
  %cache = f32[8,512]{1,0} fusion(f32[8,512]{1,0} %x), calls=%fused_computation.1
  %codes = s8[64,64]{1,0} convert(s4[64,64]{1,0} %x)
  ROOT %wide = bf16[64,64]{1,0:T(8,128)} fusion(s4[64,64]{1,0} %y), kind=kLoop, calls=%fused_computation.1
}
"""
        assert list(aot.widened(text, {(64, 64)})) == ["bf16[64,64] of wide"]


class TestRefused:
    def test_what_is_no_tpu(self, tmp_path: Path) -> None:
        model = described(tmp_path, tiny_config())
        assert "compile: h100:1 is no TPU" in refused("plan", model, "--target", "h100", "--compile")

    def test_without_the_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(aot, "find_spec", lambda _: None)
        with pytest.raises(BackendError, match=r"needs the TPU compiler.*pip install 'llmq\[tpu\]'"):
            make_plan(described(tmp_path, tiny_config()), None, PlanOptions(targets=("v5e",), compile=True))
        assert jax.config.values["jax_enable_compilation_cache"], "it is on again"


@pytest.mark.tpu_aot
@pytest.mark.slow
@needs_compiler
class TestCompiler:
    @pytest.mark.parametrize("target", ["v5e", "v6e"])
    @pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
    @pytest.mark.parametrize(
        "quantization",
        [
            QuantizationConfig(scheme="int4_blockwise", group_size=128, symmetric=False),
            QuantizationConfig(scheme="int4_blockwise", group_size=128, symmetric=True),
            QuantizationConfig(scheme="int8_per_channel"),
        ],
        ids=["asym", "sym", "int8"],
    )
    @pytest.mark.parametrize("config", [LLAMA_2_7B, LLAMA_3_8B], ids=["Llama-2-7B", "Llama-3-8B"])
    def test_a_whole_model(
        self, config: dict, quantization: QuantizationConfig, kv_cache_dtype: str, target: str, tmp_path: Path
    ) -> None:
        """Weights are read as they are stored and caches updated in place; the plan knows the bytes."""
        subject = read_subject(described(tmp_path, config))
        weights = subject.outline(subject.quantized(quantization), quantization)
        kv_int8 = kv_cache_dtype == "int8"
        options = ModelOptions(dtype="bfloat16", num_slots=8, max_len=1024, kv_int8=kv_int8)
        decode, prefill, head = aot.compile_steps(weights, f"{target}:1x1", options)
        cache = 8 * 1024 * bytes_per_token(subject.config, "int8" if kv_int8 else "bfloat16")
        assert decode.argument_bytes == pytest.approx(weights.num_bytes + cache, rel=0.02)
        assert decode.temporary_bytes < 64 << 20
        assert prefill.temporary_bytes < 64 << 20
        for step in (decode, prefill, head):
            assert step.widened == ()
            assert step.collectives == {}
            assert step.missing_bytes == 0

    def test_bfloat16_does_not_fit_one_v5e(self, tmp_path: Path) -> None:
        model = described(tmp_path, LLAMA_2_7B)
        subject = read_subject(model)
        weights = subject.outline(subject.unquantized(), None)
        decode, *_ = aot.compile_steps(weights, "v5e:1x1", ModelOptions(dtype="bfloat16", num_slots=8, max_len=2048))
        assert 4 * GIB < decode.missing_bytes < 5.5 * GIB
        row = make_plan(model, None, PlanOptions(max_model_len=2048))["targets"][0]["schemes"]["bfloat16"]
        assert not row["fits"]

    @pytest.mark.parametrize(
        ("config", "group_size"), [(LLAMA_2_7B, 32), (LLAMA_3_8B, 128)], ids=["Llama-2-7B", "Llama-3-8B"]
    )
    def test_eight_chips(self, config: dict, group_size: int, tmp_path: Path) -> None:
        """Two sums a layer, and those of the embedding."""
        subject = read_subject(described(tmp_path, config))
        quantization = QuantizationConfig(scheme="int4_blockwise", group_size=group_size)
        weights = subject.outline(subject.quantized(quantization), quantization)
        options = ModelOptions(dtype="bfloat16", num_slots=8, max_len=1024, tp=8)
        decode, prefill, _ = aot.compile_steps(weights, "v5e:2x4", options)
        cache = 8 * 1024 * bytes_per_token(subject.config, "bfloat16")
        assert decode.argument_bytes == pytest.approx((weights.num_bytes + cache) / 8, rel=0.02)
        for step in (decode, prefill):
            assert step.collectives == {"all-reduce a layer": 2, "all-reduce": 2}
            assert step.widened == ()
            assert step.temporary_bytes < 64 << 20

    def test_windows_and_rotations_by_layer(self, tmp_path: Path) -> None:
        config = tiny_config(**GEMMA3, hidden_size=512, intermediate_size=1024, vocab_size=4096)
        subject = read_subject(described(tmp_path, {**config, "head_dim": 128}))
        quantization = QuantizationConfig(scheme="int4_blockwise")
        weights = subject.outline(subject.quantized(quantization), quantization)
        decode, *_ = aot.compile_steps(weights, "v5e:1x1", ModelOptions(dtype="bfloat16", num_slots=8, max_len=512))
        assert decode.widened == ()
        assert decode.argument_bytes > 0

    def test_a_form_that_widens_is_found(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Dequantized, reshaped and multiplied, a weight is written out in bfloat16 first."""

        def widens(self: EinsumLinear, x_MI: jax.Array) -> jax.Array:
            weight = self.values_GgO.astype(x_MI.dtype) * self.scale_GO[:, None].astype(x_MI.dtype)
            return jnp.dot(x_MI, weight.reshape(-1, weight.shape[-1]))

        monkeypatch.setattr(EinsumLinear, "__call__", widens)
        config = tiny_config(hidden_size=1024, intermediate_size=3072, vocab_size=4096, num_attention_heads=8)
        subject = read_subject(described(tmp_path, config))
        quantization = QuantizationConfig(scheme="int4_blockwise", group_size=128)
        weights = subject.outline(subject.quantized(quantization), quantization)
        options = ModelOptions(dtype="bfloat16", num_slots=16, max_len=256)
        assert any(step.widened for step in aot.compile_steps(weights, "v5e:1x1", options))


def test_what_is_planned_is_what_is_asked_for(tmp_path: Path) -> None:
    """The outline has the types and shapes that a conversion would write."""
    subject = read_subject(described(tmp_path, tiny_config()))
    for quantization in (
        None,
        QuantizationConfig(scheme="int4_blockwise"),
        QuantizationConfig(scheme="int8_blockwise"),
    ):
        rows = subject.quantized(quantization) if quantization else subject.unquantized()
        weights = subject.outline(rows, quantization)
        assert weights.num_bytes == sum(row.stored_bytes for row in rows)
        assert weights.quantization == quantization


def test_only_tpus_are_compiled_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no TPU"):
        make_plan(described(tmp_path, tiny_config()), None, PlanOptions(targets=("v5e", "l4"), compile=True))
