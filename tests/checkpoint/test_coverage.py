"""Which tensor gets which scheme, and what is said about the others."""

from pathlib import Path
from typing import Any

import pytest

from llmq.checkpoint.coverage import Action, TensorPlan, check_strict, plan_coverage
from llmq.checkpoint.reader import open_checkpoint
from llmq.config import Granularity, Override, QuantizationConfig
from llmq.errors import ConfigError, CoverageError
from llmq.model.config import ModelConfig
from tests.tiny import write_tiny


def plan(path: Path, **config: Any) -> dict[str, TensorPlan]:
    reader = open_checkpoint(str(path))
    fields = {"scheme": "int4_blockwise", **config}
    rows = plan_coverage(reader.tensors, ModelConfig.from_dict(reader.config), QuantizationConfig(**fields))
    assert {row.name for row in rows} == set(reader.tensors), "every tensor has a row"
    return {row.name: row for row in rows}


UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def test_defaults(tmp_path: Path) -> None:
    rows = plan(
        write_tiny(
            tmp_path / "m",
            hidden_size=96,
            num_attention_heads=3,
            num_key_value_heads=1,
            intermediate_size=256,
            attention_bias=True,
        )
    )
    assert (rows[UP].scheme.group_size, rows[DOWN].scheme.group_size) == (32, 128)
    assert not rows[UP].scheme.symmetric
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert str(rows[name].scheme) == "int8_per_channel sym"
    for name, row in rows.items():
        if name.endswith(("norm.weight", ".bias")):
            assert row.action is Action.KEEP
            assert "never quantized" in row.reason
            assert not row.deviates
    check_strict(list(rows.values()))


def test_a_tied_head_that_is_stored_twice_is_dropped(tmp_path: Path) -> None:
    from tests.tiny import random_tensors, tiny_config, write_checkpoint

    tensors = random_tensors(tiny_config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"]
    rows = plan(write_checkpoint(tmp_path / "m", tiny_config(tie_word_embeddings=True), tensors))
    assert rows["lm_head.weight"].action is Action.DROP
    assert rows["lm_head.weight"].reason == "tied to the embedding, stored once"
    assert rows["model.layers.0.self_attn.rotary_emb.inv_freq"].action is Action.DROP


def test_a_width_without_a_legal_group_is_kept_and_reported(tmp_path: Path) -> None:
    rows = plan(write_tiny(tmp_path / "m", intermediate_size=16 * 269))
    assert rows[DOWN].action is Action.KEEP
    assert rows[DOWN].reason == "none of the groups 128, 64, 32 divides 4304"
    assert rows[UP].action is Action.QUANTIZE
    with pytest.raises(
        CoverageError, match=r"strict: 3 tensors .* model.layers.\*.mlp.down_proj.weight \(3\): none of the groups"
    ):
        check_strict(list(rows.values()))


def test_an_explicit_group_size_must_divide_or_be_allowed_to_fall_back(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path / "m", hidden_size=192, num_attention_heads=3, num_key_value_heads=1, intermediate_size=256
    )
    with pytest.raises(ConfigError) as caught:
        plan(path, group_size=128)
    message = str(caught.value)
    assert "group_size=128: does not divide the input features of 18 of 21 matrices" in message
    assert "model.layers.*.self_attn.q_proj (3 with 192 inputs)" in message
    assert "use --groupsize 64 or 32 or 16" in message
    assert "--groupsize-fallback" in message

    rows = plan(path, group_size=128, groupsize_fallback=True)
    assert rows[UP].scheme.group_size == 64
    assert rows[UP].reason == "group 128 does not divide 192"
    assert rows[DOWN].scheme.group_size == 128
    with pytest.raises(CoverageError, match="18 tensors would not be quantized as asked"):
        check_strict(list(rows.values()))


def test_overrides_and_ignore(tmp_path: Path) -> None:
    rows = plan(
        write_tiny(tmp_path / "m"),
        overrides=(
            Override(pattern="re:.*down_proj", scheme="w8a16"),
            Override(pattern="model.layers.0.mlp.down_proj", scheme="none"),
        ),
        ignore=("lm_head", "model.layers.2.*"),
    )
    assert rows[DOWN].reason == "--override keeps it"
    assert str(rows["model.layers.1.mlp.down_proj.weight"].scheme) == "int8_per_channel sym"
    assert rows["model.layers.2.mlp.down_proj.weight"].reason == "--ignore keeps it"
    assert rows["lm_head.weight"].action is Action.KEEP
    check_strict(list(rows.values()))  # what the user asked for does not deviate


@pytest.mark.parametrize(
    ("config", "tied", "message"),
    [
        (
            {"ignore": ("*.experts.*",)},
            False,
            r"ignore='\*.experts.\*': matches no linear, embedding or head; module names read like",
        ),
        ({"overrides": (Override(pattern="re:down", scheme="none"),)}, False, "override='re:down': matches no"),
        ({"ignore": ("lm_head",)}, True, "the head is tied to the embedding, so use --embedding none"),
        ({"ignore": ("re:(",)}, False, "is not a valid regular expression"),
    ],
)
def test_patterns_must_match_something(config: dict, tied: bool, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(write_tiny(tmp_path / "m", tie_word_embeddings=tied), **config)


def test_policies_of_embedding_and_head(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m")
    rows = plan(path, embedding="none", lm_head="int4_blockwise", group_size=32)
    assert rows["model.embed_tokens.weight"].reason == "--embedding keeps it"
    assert rows["lm_head.weight"].scheme.granularity is Granularity.BLOCKWISE
    assert rows["lm_head.weight"].scheme.group_size == 32


def test_an_override_may_name_its_group_size(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_hidden_layers=1)
    overrides = tuple(map(Override.parse, ("*.up_proj=int4_blockwise:32", "*.down_proj=int4_blockwise")))
    rows = plan(path, group_size=64, overrides=overrides)
    assert rows[UP].scheme.group_size == 32
    assert rows[DOWN].scheme.group_size == 64
    with pytest.raises(ConfigError, match=r"^group_size=256: does not divide .* 1 of 1 matrices: .*up_proj"):
        plan(path, group_size=64, overrides=(Override.parse("*.up_proj=int4_blockwise:256"),))
    for text, message in (("a=int8_per_channel:32", "has no groups"), ("a=int4_blockwise:12", "multiple of 8")):
        with pytest.raises(ConfigError, match=message):
            Override.parse(text)
