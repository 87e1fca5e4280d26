"""What a ``config.json`` says: layers that attend in several ways, and what is refused."""

from typing import Any

import pytest

from llmq.errors import CheckpointError, UnsupportedModelError
from llmq.model.config import Attention, Experts, ModelConfig, Rotary
from tests.tiny import GEMMA3, MIXTRAL, QWEN3_MOE, tiny_config

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(num_hidden_layers=7, **changes))


def windows(config: ModelConfig) -> list[int | None]:
    return [config.attentions[config.attention_index(layer)].window for layer in range(config.num_layers)]


class TestWindows:
    def test_where_all_layers_attend_alike_there_is_one_way(self) -> None:
        assert read().attentions == (Attention(None, Rotary()),)
        assert read(architectures=["MistralForCausalLM"], sliding_window=8).attentions == (Attention(8, Rotary()),)

    @pytest.mark.parametrize("pattern", [1, 2, 3, 7])
    def test_every_nth_layer_of_a_pattern_sees_all(self, pattern: int) -> None:
        expected = [None if (layer + 1) % pattern == 0 else 8 for layer in range(7)]
        assert windows(read(**{**GEMMA3, "sliding_window_pattern": pattern})) == expected

    def test_layer_types_come_before_a_pattern(self) -> None:
        kinds = ["full_attention", *["sliding_attention"] * 5, "full_attention"]
        assert windows(read(**GEMMA3, layer_types=kinds)) == [None, 8, 8, 8, 8, 8, None]

    @pytest.mark.parametrize("first", [0, 3, 7, 28])
    def test_the_first_layers_see_all(self, first: int) -> None:
        assert windows(read(**QWEN3, max_window_layers=first)) == [None if i < first else 8 for i in range(7)]

    def test_a_window_that_is_not_used_is_none(self) -> None:
        assert windows(read(**{**QWEN3, "use_sliding_window": False})) == [None] * 7

    def test_layers_with_a_window_have_their_own_rotation(self) -> None:
        full, local = read(**GEMMA3).attentions
        assert full == (None, Rotary(kind="linear", theta=100000.0, factor=4.0, original_max_positions=512))
        assert local == (8, Rotary(theta=1000.0))

    def test_what_a_gemma3_file_leaves_out(self) -> None:
        names = ("architectures", "model_type", "hidden_act", "sliding_window")
        config = read(**{name: GEMMA3[name] for name in names}, rope_theta=None, tie_word_embeddings=None)
        assert windows(config) == [8, 8, 8, 8, 8, None, 8]
        assert [way.rotary.theta for way in config.attentions] == [1e6, 1e4]
        assert (config.head_dim, config.attention_scale, config.tie_embeddings) == (256, 1 / 16, True)


class TestExperts:
    def test_mixtral(self) -> None:
        config = read(**MIXTRAL, rope_theta=None)
        assert config.experts == Experts(num_experts=4, num_chosen=2, normalized=True)
        assert (config.intermediate_size, config.rotary.theta, config.qk_norm) == (256, 1e6, False)

    @pytest.mark.parametrize("normalized", [None, False, True])
    def test_qwen3_moe(self, normalized: bool | None) -> None:
        config = read(**{**QWEN3_MOE, "norm_topk_prob": normalized})
        assert config.experts == Experts(num_experts=6, num_chosen=3, normalized=bool(normalized))
        assert (config.intermediate_size, config.qk_norm) == (64, True)

    def test_both_spellings_of_their_number(self) -> None:
        spelled = {**QWEN3_MOE, "num_experts": None, "num_local_experts": 6}
        assert read(**spelled).experts == read(**QWEN3_MOE).experts

    def test_others_have_none(self) -> None:
        assert read().experts is None

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"num_experts_per_tok": 7}, "num_experts_per_tok=7: must be at most the 6 experts"),
            ({"num_experts_per_tok": 0}, "num_chosen=0"),
            ({"num_experts_per_tok": None}, "the field 'num_experts_per_tok' is missing"),
            ({"moe_intermediate_size": None}, "the field 'moe_intermediate_size' is missing"),
            ({"num_experts": None}, "num_experts=0"),
        ],
    )
    def test_numbers_that_cannot_be(self, changes: dict[str, Any], sentence: str) -> None:
        with pytest.raises(CheckpointError, match=sentence):
            read(**{**QWEN3_MOE, **changes})


REFUSED = {
    "every other layer": (
        {**QWEN3_MOE, "decoder_sparse_step": 2},
        "decoder_sparse_step=2: .* with experts in every layer",
    ),
    "a dense layer": (
        {**QWEN3_MOE, "mlp_only_layers": [0]},
        r"mlp_only_layers=\[0\]: Qwen3MoeForCausalLM is supported",
    ),
    "windows": ({**QWEN3_MOE, "use_sliding_window": True}, "use_sliding_window=True"),
    "not normalized": ({**MIXTRAL, "norm_topk_prob": False}, "norm_topk_prob=False"),
    "softcap": ({**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: Gemma3ForCausalLM is"),
    "score cap": ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "both ways": ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "activation": ({**GEMMA3, "hidden_activation": "silu"}, "hidden_activation='silu': .*'gelu_pytorch_tanh' only"),
    "another kind": ({**GEMMA3, "layer_types": ["chunked_attention"] * 7}, "layer_types: llmq reads full_attention or"),
    "too few kinds": ({**QWEN3, "layer_types": ["full_attention"]}, "for each of the 7 layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        read(**changes)


@pytest.mark.parametrize("field", ["sliding_window_pattern", "query_pre_attn_scalar"])
@pytest.mark.parametrize("value", [0, -1, "6", True])
def test_a_field_that_is_no_number_above_0_is_named(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{field}={value!r}: must be a number above 0"):
        read(**{**GEMMA3, field: value})
