"""The plan against sizes that are written, memory that is measured, and rates worked out by hand."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.backends.base import Memory
from llmq.checkpoint.loader import load_weights
from llmq.config import SCHEMES, QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import AlreadyQuantizedError, CheckpointError, ConfigError
from llmq.model.config import ModelConfig
from llmq.model.names import expected_tensors
from llmq.model.shards import check_tp, share
from llmq.plan.chips import CHIPS, Target
from llmq.plan.memory import RESERVE
from llmq.plan.roofline import MAX_BATCH, Roofline, last_batch_that_pays, roofline
from llmq.plan.run import BATCHES, PlanOptions, make_plan
from llmq.plan.subject import read_subject
from llmq.serve.capacity import plan_capacity
from tests.commands.test_cli import llmq, refused
from tests.tiny import MIXTRAL, tiny_config, write_tiny

LLAMA_2_7B = tiny_config(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=4096,
)  # fmt: skip
LLAMA_3_8B = tiny_config(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip

#: A small process between: the kernel counts for a child what its parent held when it was made.
PEAK_OF_CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


EXPERTS = {
    "mixtral": (
        {
            "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        46.7e9,
        12.9e9,
    ),
    "qwen3-moe": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": True,
        },
        30.5e9,
        3.34e9,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Llama-2-7B as a ``config.json`` alone."""
    path = tmp_path_factory.mktemp("llama-2-7b")
    (path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return str(path)


def plan(model: str, target: str = "v5e", quantization: QuantizationConfig | None = None, **asked: object):
    return make_plan(model, quantization, PlanOptions(targets=(target,), **asked))


class TestExperts:
    """Mixtral-8x7B and Qwen3-30B-A3B from their ``config.json`` alone."""

    @pytest.fixture(params=["mixtral", "qwen3-moe"])
    def model(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, float, float]:
        """The model, and its published numbers of weights: all, and those that a token uses."""
        config, *numbers = EXPERTS[request.param]
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path), *numbers

    def test_all_are_held_and_few_are_multiplied(self, model: tuple[str, float, float]) -> None:
        path, total, active = model
        subject = read_subject(path)
        rows = subject.unquantized()
        assert sum(math.prod(row.shape) for row in rows) == pytest.approx(total, rel=0.01)
        bound = roofline(rows, subject.config, CHIPS["h100"], 0, 1, 1)
        looked_up = subject.config.vocab_size * subject.config.hidden_size
        assert bound.matrix_ops / 2 + looked_up == pytest.approx(active, rel=0.02)

    def test_experts_are_of_the_scheme_and_routers_are_not(self, tmp_path: Path) -> None:
        found = plan(
            str(write_tiny(tmp_path / "m", **MIXTRAL)), quantization=QuantizationConfig(scheme="int4_blockwise")
        )
        assert found["kinds"]["linear"]["count"] == 3 * (4 + 3 * 4)
        assert 3 * found["kinds"]["linear"]["after"] < found["kinds"]["linear"]["before"]
        assert found["kinds"]["router"] == {"count": 3, "before": 3 * 2 * 4 * 128, "after": 3 * 2 * 4 * 128}

    def test_a_step_reads_what_some_token_chose(self, model: tuple[str, float, float]) -> None:
        path, _, active = model
        subject = read_subject(path)
        bound = roofline(subject.unquantized(), subject.config, CHIPS["v5e"], 0, 1, 1)
        all_read = (bound.weight_bytes + bound.expert_bytes) / CHIPS["v5e"].bandwidth
        one = bound.step(1, 0) * CHIPS["v5e"].bandwidth
        assert one + 2 * subject.config.vocab_size * subject.config.hidden_size == pytest.approx(2 * active, rel=0.02)
        steps = [bound.step(batch, 0) for batch in (1, 2, 4, 8)]
        assert steps == sorted(set(steps))
        assert steps[-1] < all_read


class TestChips:
    def test_every_figure_has_a_source(self) -> None:
        for chip in CHIPS.values():
            assert chip.source.startswith("https://")
            assert chip.int8_rate >= chip.bf16_rate > 1e13
            assert 1e10 < chip.memory < 1e12
            assert 1e11 < chip.bandwidth < 1e13

    def test_a_target_is_read_back(self) -> None:
        for text, num_chips in {"v5e:2x4": 8, "v6e:1x1": 1, "v5p:2x2x1": 4, "h100:8": 8}.items():
            assert str(Target.parse(text)) == text
            assert Target.parse(text).num_chips == num_chips
        assert Target.parse("V5E").shape == (1, 1)
        assert Target.parse("h100").num_chips == 1

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("v9", "unknown chip 'v9'; llmq knows v4, v5e"),
            ("", "unknown chip"),
            ("v5e:8", "a v5e slice has 2 sizes, as in v5e:2x2"),
            ("v5p:2x2", "a v5p slice has 3 sizes"),
            ("h100:2x4", "must be a chip and how many, as in h100:2"),
            ("h100:0", "must be a chip and how many"),
            ("v5e:2x-4", "2 sizes"),
            ("v5e:99999x1", "2 sizes"),
        ],
    )
    def test_what_is_none(self, text: str, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            Target.parse(text)


class TestSizes:
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_are_those_that_convert_writes(self, scheme: str, tmp_path: Path) -> None:
        model = str(write_tiny(tmp_path / "model"))
        config = QuantizationConfig(scheme=scheme, symmetric=False)
        found = plan(model, quantization=config)
        convert(plan_conversion(model, config), tmp_path / "artifact")
        written = load_weights(str(tmp_path / "artifact"))
        assert sum(kind["after"] for kind in found["kinds"].values()) == written.num_bytes
        assert sum(kind["before"] for kind in found["kinds"].values()) == load_weights(model).num_bytes
        artifact = plan(str(tmp_path / "artifact"))
        assert artifact["schemes"]["artifact"] == found["schemes"][found["scheme"]] == written.num_bytes
        assert artifact["kinds"] == found["kinds"]
        assert artifact["targets"][0]["schemes"]["bfloat16"] == found["targets"][0]["schemes"]["bfloat16"]
        assert artifact["conversion_bytes"] is None

    def test_a_config_alone_gives_what_weights_would(self, tmp_path: Path) -> None:
        with_weights = write_tiny(tmp_path / "model")
        alone = tmp_path / "alone"
        alone.mkdir()
        (alone / "config.json").write_bytes((with_weights / "config.json").read_bytes())
        found = [plan(str(model)) for model in (with_weights, alone)]
        assert {**found[0], "model": ""} == {**found[1], "model": ""}

    def test_of_a_hub_id_only_the_config_is_fetched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def snapshot_download(model: str, allow_patterns: list[str]) -> str:
            asked.append((model, allow_patterns))
            (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
            return str(tmp_path)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert plan("some/model")["num_weights"] == 8_030_261_248  # as its model card says: 8.03 B
        assert asked == [("some/model", ["config.json"])]

    def test_an_index_without_its_shards_is_incomplete(self, tmp_path: Path) -> None:
        model = write_tiny(tmp_path / "model", num_shards=2)
        next(model.glob("*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match="is missing"):
            plan(str(model))

    @pytest.mark.slow
    def test_memory_of_a_conversion(self, tmp_path: Path) -> None:
        """What the kernel counts for the process, on a model whose matrices are far larger than the rest."""
        model = write_tiny(tmp_path / "model", hidden_size=1024, intermediate_size=8192, vocab_size=65536)
        found = plan(str(model))["conversion_bytes"]
        arguments = ["convert", str(model), "-o", str(tmp_path / "artifact"), "--scheme", "int4_blockwise"]
        measure = [sys.executable, "-c", PEAK_OF_CHILD, sys.executable, "-m", "llmq", *arguments]
        peak = int(subprocess.run(measure, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
        assert 0.7 < peak / found < 1.1


class TestFit:
    def test_the_largest_that_fit_do_and_more_does_not(self, described: str) -> None:
        row = plan(described, max_num_seqs=2, max_model_len=1024)["targets"][0]["schemes"]["int4_blockwise"]
        assert row["fits"]
        for asked, fits in [
            ({"max_num_seqs": row["largest_batch"], "max_model_len": 1024}, True),
            ({"max_num_seqs": row["largest_batch"] + 1, "max_model_len": 1024}, False),
            ({"max_num_seqs": 2, "max_model_len": row["largest_context"]}, True),
        ]:
            found = plan(described, **asked)["targets"][0]["schemes"]["int4_blockwise"]
            assert found["fits"] is fits
            assert (found["missing_bytes"] == 0) is fits
            assert (found["needed_bytes"] <= CHIPS["v5e"].memory * (1 - RESERVE)) is fits

    def test_a_7b_in_bfloat16_does_not_fit_one_v5e(self, described: str) -> None:
        schemes = plan(described)["targets"][0]["schemes"]
        assert not schemes["bfloat16"]["fits"]
        assert schemes["bfloat16"]["largest_batch"] == 0
        assert schemes["bfloat16"]["weight_bytes"] == 2 * 6_738_415_616
        halves = QuantizationConfig(scheme="int4_blockwise", group_size=64)
        assert plan(described, "v5e:2x2", halves)["targets"][0]["schemes"]["bfloat16"]["fits"]

    def test_a_server_chooses_what_the_plan_says(self, tmp_path: Path) -> None:
        model = str(write_tiny(tmp_path / "model"))
        row = plan(model, max_num_seqs=4)["targets"][0]["schemes"]["bfloat16"]
        memory = Memory(int(CHIPS["v5e"].memory), int(CHIPS["v5e"].memory))
        asked = {"dtype": "bfloat16", "kv_int8": False, "max_len": 512, "default_slots": 10**9}
        found = plan_capacity(load_weights(model), memory, num_slots=None, **asked)
        assert found.num_slots == row["largest_batch"]

    def test_int8_keys_and_values_take_about_half(self, described: str) -> None:
        wide, narrow = (plan(described, kv_cache_dtype=kind)["cache"]["bytes_per_token"] for kind in ("auto", "int8"))
        assert wide == 2 * 32 * 32 * 128 * 2
        assert narrow == 2 * 32 * 32 * (128 + 4)


class TestRates:
    def test_by_hand(self, described: str) -> None:
        """Llama-2-7B in bfloat16 on an H100, one sequence of half of 4,096 tokens: bound by what it reads."""
        row = plan(described, "h100")["targets"][0]["schemes"]["bfloat16"]
        read = 2 * (6_738_415_616 - 32000 * 4096) + 2048 * 2 * 32 * 32 * 128 * 2
        assert row["decode"]["1"] == pytest.approx(3350e9 / read)
        multiplied = 6_738_415_616 - 32000 * 4096 - 65 * 4096
        attended = 4 * 32 * 4096 * 4096 / 2
        assert row["prefill"] == pytest.approx(989e12 / (2 * multiplied + attended))

    def test_narrower_is_faster_and_larger_batches_too(self, described: str) -> None:
        for target in ("v5e", "v6e", "h100", "v5e:2x4"):
            schemes = plan(described, target, quantization=QuantizationConfig(scheme="int4_blockwise", group_size=32))
            rows = schemes["targets"][0]["schemes"]
            rates = {name: [row["decode"][str(batch)] for batch in BATCHES] for name, row in rows.items()}
            order = ["bfloat16", "int8_per_channel", "int4_blockwise g32"]
            for slower, faster in itertools.pairwise(order):
                assert np.all(np.asarray(rates[slower]) <= rates[faster])
            for rate in rates.values():
                assert rate == sorted(rate)

    def test_two_replicas_answer_twice_as_many(self, described: str) -> None:
        one, two = (
            plan(described, target, tp=1)["targets"][0]["schemes"]["int4_blockwise"] for target in ("v6e", "v6e:1x2")
        )
        assert two["decode"]["8"] > one["decode"]["8"]
        assert two["decode"]["1"] == one["decode"]["1"], "one sequence is on one replica"
        assert two["prefill"] == pytest.approx(2 * one["prefill"])
        assert two["largest_batch"] == 2 * one["largest_batch"]

    @given(
        weights=st.floats(1e6, 1e12),
        narrower=st.floats(0.01, 0.999),
        ops=st.floats(1e6, 1e13),
        cache=st.floats(0, 1e8),
        context=st.integers(1, 10**6),
    )
    def test_the_last_batch_that_pays(
        self, weights: float, narrower: float, ops: float, cache: float, context: int
    ) -> None:
        wide = Roofline(CHIPS["v5e"], weights, ops, cache, 1000.0, 1)
        narrow = Roofline(CHIPS["v5e"], weights * narrower, ops, cache, 1000.0, 1)
        last = last_batch_that_pays(narrow, wide, context)

        def saved(batch: int) -> float:
            return 1 - narrow.step(batch, context) / wide.step(batch, context)

        assert last == 0 or saved(last) >= 0.05 - 1e-9
        assert last == MAX_BATCH or saved(last + 1) < 0.05 + 1e-9

    def test_it_is_where_multiplying_takes_over(self) -> None:
        """Without a cache, a step of bfloat16 weights is bound by its rate from rate / bandwidth on: 240 on a v5e."""
        chip = CHIPS["v5e"]
        wide, narrow = (Roofline(chip, size, 2e9, 0, 0, 1) for size in (2e9, 0.5e9))
        assert last_batch_that_pays(narrow, wide, 1) == math.floor(0.95 * chip.bf16_rate / chip.bandwidth)


class TestSplit:
    def test_llama_2_7b_at_group_128(self, described: str) -> None:
        config = QuantizationConfig(scheme="int4_blockwise", group_size=128)
        with pytest.raises(ConfigError) as err:
            plan(described, "v5e:2x2", config)
        assert "11008 input features in 86 groups of 128, which 4 devices cannot share" in str(err.value)
        assert "use --groupsize 64 or 32 or 16, or another --tp" in str(err.value)
        for size in (64, 32, 16):
            assert plan(described, "v5e:2x2", QuantizationConfig(scheme="int4_blockwise", group_size=size))

    @pytest.mark.parametrize(
        ("config", "tp", "sentence"),
        [
            (LLAMA_3_8B, 3, "32 heads and 8 key/value heads cannot be shared by 3 devices; use --tp 1 or 2"),
            (LLAMA_3_8B, 12, "use --tp 4 or 8"),
            ({**LLAMA_2_7B, "intermediate_size": 11009}, 2, "intermediate_size=11009"),
            ({**LLAMA_2_7B, "vocab_size": 32001}, 2, "vocab_size=32001"),
            (LLAMA_2_7B, 0, "must be at least 1"),
        ],
    )
    def test_what_cannot_be_shared(self, config: dict, tp: int, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            check_tp(tp, ModelConfig.from_dict(config), {})

    @pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
    def test_devices_hold_the_model_between_them(self, tp: int) -> None:
        """Once, but for norms and for key/value heads where there are fewer of them than devices."""
        config = ModelConfig.from_dict(LLAMA_3_8B)
        check_tp(tp, config, {})
        for name, row in expected_tensors(config).items():
            copies = tp * share(name, row.kind, config, tp)
            assert copies == (tp if "norm" in name else max(1, tp / 8) if "k_proj" in name or "v_proj" in name else 1)

    def test_tp_and_chips(self, described: str) -> None:
        with pytest.raises(ConfigError, match="tp=3: does not divide the 4 chips of v5e:2x2"):
            plan(described, "v5e:2x2", tp=3)
        found = plan(described, "v5e:2x4", tp=2)["targets"][0]
        assert (found["tp"], found["dp"]) == (2, 4)


class TestRefused:
    def test_a_scheme_for_an_artifact(self, tmp_path: Path) -> None:
        model = str(write_tiny(tmp_path / "model"))
        config = QuantizationConfig(scheme="int8_per_channel")
        convert(plan_conversion(model, config), tmp_path / "artifact")
        with pytest.raises(AlreadyQuantizedError, match="is an artifact of llmq already; leave --scheme"):
            plan(str(tmp_path / "artifact"), quantization=config)

    def test_somebody_elses_config(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(
            json.dumps({**LLAMA_2_7B, "quantization_config": {"quant_method": "awq"}})
        )
        with pytest.raises(AlreadyQuantizedError, match="already quantized with awq"):
            plan(str(tmp_path))

    def test_a_context_beyond_the_models(self, described: str) -> None:
        with pytest.raises(ConfigError, match="max_model_len=5000: is more than the model's context of 4096"):
            plan(described, max_model_len=5000)


class TestCommand:
    def test_table_and_json_agree(self, described: str) -> None:
        done = llmq("plan", described, "--target", "v5e", "--target", "h100:2", "--tp", 1, "--json")
        found = json.loads(done.stdout)
        assert [target["target"] for target in found["targets"]] == ["v5e:1x1", "h100:2"]
        for target in found["targets"]:
            assert target["chip"]["source"] in done.stderr
            for name, row in target["schemes"].items():
                line = next(line for line in done.stderr.splitlines() if line.startswith(f"{name} "))
                assert ("yes" in line) is found["targets"][0]["schemes"][name]["fits"]
                assert f"{row['prefill']:,.0f}" in done.stderr

    def test_what_was_asked_stands_first(self, described: str) -> None:
        done = llmq("plan", described, "--scheme", "int4_blockwise", "--groupsize", 64, "--sym", "--json")
        found = json.loads(done.stdout)
        assert found["scheme"] == "int4_blockwise g64 sym"
        assert list(found["schemes"]) == ["int4_blockwise g64 sym", "bfloat16", "int8_per_channel", "int4_blockwise"]

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("--target", "a1"), "unknown chip 'a1'"),
            (("--max-num-seqs", 0), "max_num_seqs=0"),
            (("--tp", 0), "tp=0"),
            (("--kv-cache-dtype", "int4"), "kv_cache_dtype='int4'"),
            (("--groupsize", 100), "group_size=100"),
            (("--target", "v5e:2x2"), "86 groups of 128"),
        ],
    )
    def test_bad_values_are_one_sentence(self, described: str, arguments: tuple, sentence: str) -> None:
        assert sentence in refused("plan", described, *arguments)

    def test_torch_and_jax_stay_out(self, described: str) -> None:
        code = f"""
import sys
from llmq.cli import app
app(["plan", {described!r}], standalone_mode=False)
assert not {{"torch", "jax"}} & set(sys.modules)
"""
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_bytes_are_counted_in_the_compute_type(tmp_path: Path) -> None:
    """A float32 checkpoint is served in bfloat16."""
    found = [plan(str(write_tiny(tmp_path / d.__name__, dtype=d))) for d in (np.float32, ml_dtypes.bfloat16)]
    assert found[0]["schemes"] == found[1]["schemes"]
    assert found[0]["kinds"]["norm"]["before"] == 2 * found[1]["kinds"]["norm"]["before"]
