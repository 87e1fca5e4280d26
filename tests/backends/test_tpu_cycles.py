"""The form of a product on TPUs against others, by the cycles that the real TPU compiler estimates."""

from importlib.util import find_spec

import pytest

from benchmarks.tpu_cycles import DOT, FORMS, INT8_INPUTS, OURS, SCALE_AFTER, Case, cycles, floor, total

needs_compiler = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'llmq[tpu]'")

PROGRAM = """
%fused_computation (p: f32[8]) -> f32[8] {
}
%inner (t: (s32[])) -> (s32[]) {
  %a = f32[8] fusion(f32[8] %x), backend_config={"estimated_cycles":"10"}
}
%inner_condition (t: (s32[])) -> pred[] {
  ROOT %lt = pred[] compare(s32[] %i, s32[] %n), direction=LT
}
%body (t: (s32[])) -> (s32[]) {
  %b = f32[8] fusion(f32[8] %x), backend_config={"estimated_cycles":"100"}
  %while.1 = (s32[]) while((s32[]) %t), condition=%inner_condition, body=%inner
}
%condition (t: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(32)
  ROOT %lt = pred[] compare(s32[] %i, s32[] %limit), direction=LT
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %c = f32[8] fusion(f32[8] %x), backend_config={"estimated_cycles":"1000"}
  %while.2 = (s32[]) while((s32[]) %t), condition=%condition, body=%body
}
"""


def test_loops_count_as_often_as_they_turn() -> None:
    assert total(PROGRAM, turns=3) == 1000 + 32 * (100 + 3 * 10)


@pytest.mark.tpu_aot
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("chip", "scheme", "symmetric", "num_rows", "others"),
    [
        ("v5e", "int4_blockwise", False, 8, [SCALE_AFTER, "dequantize, reshape, dot", "the predecessor's einsum"]),
        ("v6e", "int4_blockwise", True, 256, ["the same, all rows in one run", "dequantize, reshape, dot"]),
        ("v6e", "int4_blockwise", True, 8, [SCALE_AFTER, "the same, all rows in one run"]),
        ("v5e", "int8_per_channel", True, 32, [SCALE_AFTER]),
    ],
)
def test_no_other_form_is_faster(chip: str, scheme: str, symmetric: bool, num_rows: int, others: list[str]) -> None:
    ours = cycles(chip, Case(scheme, symmetric, OURS), num_rows)
    assert ours < cycles(chip, Case(None, True, DOT), num_rows)
    assert ours > floor(chip, Case(scheme, symmetric, OURS), num_rows)
    for form in others:
        assert form in FORMS
        assert ours <= 1.05 * cycles(chip, Case(scheme, symmetric, form), num_rows), form


@pytest.mark.tpu_aot
@pytest.mark.slow
@needs_compiler
def test_inputs_in_int8_use_the_faster_unit_in_long_runs() -> None:
    case = Case("int8_per_channel", True, INT8_INPUTS)
    assert cycles("v5e", case, 1024) < 0.8 * cycles("v5e", Case("int8_per_channel", True, OURS), 1024)
