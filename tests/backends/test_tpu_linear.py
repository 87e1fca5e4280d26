"""Layouts of a matrix, each held against the float64 product with the dequantized weight."""

import jax
import ml_dtypes
import numpy as np
import pytest

from llmq.backends.tpu import linear
from llmq.backends.tpu.linear import (
    WHOLE_FROM,
    DenseLinear,
    EinsumLayout,
    EinsumLinear,
    Int8InputLinear,
    Linear,
    ScanLinear,
)
from llmq.backends.tpu.nibbles import pack_halves, unpack_halves
from llmq.backends.tpu.table import DenseTable, EinsumTable, ScanTable, Table
from llmq.config import SCHEMES, Granularity
from llmq.quant import QTensor, dequantize, quantize, quantize_vectors
from tests.backends.bounds import assert_accumulation_only

NUM_OUTPUTS, NUM_FEATURES, GROUP_SIZE = 96, 192, 64
LINEARS = (ScanLinear, EinsumLinear)
TABLES = (ScanTable, EinsumTable)


@pytest.fixture(params=[True, False], ids=["sym", "asym"])
def symmetric(request: pytest.FixtureRequest) -> bool:
    return request.param


def random_codes(scheme: str, symmetric: bool, num_outputs: int = NUM_OUTPUTS, offset: float = 0.0) -> QTensor:
    row = SCHEMES[scheme]
    group_size = GROUP_SIZE if row.granularity is Granularity.BLOCKWISE else None
    weight = np.random.default_rng(0).standard_normal((num_outputs, NUM_FEATURES)) + offset
    changes = {"symmetric": symmetric, "group_size": group_size}
    return quantize(weight.astype(ml_dtypes.bfloat16), row.model_copy(update=changes))


def random_inputs(num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).standard_normal((num_rows, NUM_FEATURES)).astype(np.float32)


def apply(linear: Linear, x: np.ndarray) -> jax.Array:
    return jax.jit(lambda linear, x: linear(x))(linear, x)


def project(table: Table, x: np.ndarray) -> jax.Array:
    return jax.jit(lambda table, x: table.project(x))(table, x)


@pytest.mark.parametrize("layout", LINEARS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_product_errs_by_accumulation_only(layout: type[ScanLinear], scheme: str, symmetric: bool) -> None:
    weight = random_codes(scheme, symmetric)
    linear = layout.from_qtensor(weight, None)
    for num_rows in (1, 9, WHOLE_FROM - 1, WHOLE_FROM, 50):
        x = random_inputs(num_rows)
        assert_accumulation_only(apply(linear, x), x, weight)


@pytest.mark.parametrize("layout", LINEARS)
def test_weights_far_from_zero(layout: type[ScanLinear]) -> None:
    weight = random_codes("int4_blockwise", symmetric=False, offset=50.0)
    for num_rows in (3, WHOLE_FROM):
        x = random_inputs(num_rows)
        assert_accumulation_only(apply(layout.from_qtensor(weight, None), x), x, weight)


@pytest.mark.parametrize("layout", LINEARS)
def test_bias(layout: type[ScanLinear]) -> None:
    weight, x = random_codes("int4_blockwise", symmetric=False), random_inputs(2)
    bias = np.linspace(-3, 3, NUM_OUTPUTS).astype(ml_dtypes.bfloat16)
    y = apply(layout.from_qtensor(weight, bias), x)
    assert_accumulation_only(y, x, weight, bias.astype(np.float64))


@pytest.mark.parametrize("num_rows", [5, 64, 100, 128])
def test_rows_in_runs_are_put_back_in_order(num_rows: int) -> None:
    weight, x = random_codes("int4_blockwise", symmetric=False), random_inputs(num_rows)
    y = apply(EinsumLinear.from_qtensor(weight, None), x)
    assert y.shape == (num_rows, NUM_OUTPUTS)
    assert_accumulation_only(y, x, weight)


def test_pairs_of_groups_are_the_same_product(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear.PAIRS_FROM, "v6e", 70)
    row = SCHEMES["int4_blockwise"].model_copy(update={"symmetric": symmetric, "group_size": 32})
    x = np.random.default_rng(0).standard_normal((70, 512)).astype(np.float32)
    weight = quantize(np.random.default_rng(1).standard_normal((NUM_OUTPUTS, 512)).astype(ml_dtypes.bfloat16), row)
    layer = EinsumLayout("v6e").from_qtensor(weight, None)
    assert "32,8,2," not in str(jax.make_jaxpr(layer)(x[:64]))
    assert "[8,2,32,96]" in str(jax.make_jaxpr(layer)(x))
    assert_accumulation_only(apply(layer, x), x, weight)


@pytest.mark.parametrize("layout", LINEARS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_weight_of_a_bfloat16_product_is_the_dequantized_one(
    layout: type[ScanLinear], scheme: str, symmetric: bool
) -> None:
    """An input of one 1 finds each weight, rounded once."""
    weight = random_codes(scheme, symmetric)
    y = apply(layout.from_qtensor(weight, None), np.eye(NUM_FEATURES, dtype=ml_dtypes.bfloat16))
    np.testing.assert_array_equal(np.asarray(y).T, dequantize(weight, "bfloat16"))


@pytest.mark.parametrize("layout", LINEARS)
class TestInt8Inputs:
    def test_codes_times_codes(self, layout: type[ScanLinear], symmetric: bool) -> None:
        weight, x = random_codes("int8_per_channel", symmetric), random_inputs(9)
        x[3] = 0
        x[4] *= 1e4
        bias = np.linspace(-3, 3, NUM_OUTPUTS).astype(ml_dtypes.bfloat16)
        layer = Int8InputLinear(layout.from_qtensor(weight, None), bias)
        values, scale = jax.jit(quantize_vectors)(x)
        rounded = np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None]
        assert np.abs(rounded - x).max(axis=1) == pytest.approx(np.abs(x).max(axis=1) / 254, rel=0.3)
        y = apply(layer, x)
        assert_accumulation_only(y, rounded, weight, bias.astype(np.float64))
        np.testing.assert_array_equal(y[3], bias.astype(np.float32))

    def test_result_has_the_type_of_x(self, layout: type[ScanLinear]) -> None:
        layer = Int8InputLinear(layout.from_qtensor(random_codes("int8_per_channel", True), None), None)
        assert jax.eval_shape(layer, random_inputs(2).astype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


def test_inputs_in_int8_are_multiplied_as_integers() -> None:
    layer = Int8InputLinear(EinsumLinear.from_qtensor(random_codes("int8_per_channel", True), None), None)
    assert "preferred_element_type=int32" in str(jax.make_jaxpr(layer)(random_inputs(2)))


@pytest.mark.parametrize("layout", [*LINEARS, DenseLinear])
def test_result_has_the_type_of_x(layout: type[Linear]) -> None:
    weight = random_codes("int4_blockwise", symmetric=True)
    dense = layout is DenseLinear
    linear = DenseLinear(dequantize(weight, "bfloat16").T, None) if dense else layout.from_qtensor(weight, None)
    assert jax.eval_shape(linear, random_inputs(2).astype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("layout", TABLES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_table(layout: type[ScanTable], scheme: str, symmetric: bool) -> None:
    weight, x = random_codes(scheme, symmetric), random_inputs(3)
    table = layout.from_qtensor(weight)
    ids = np.array([0, 95, 7, 7])
    np.testing.assert_array_equal(table.lookup(ids, "float32"), dequantize(weight)[ids])
    assert_accumulation_only(project(table, x), x, weight)


def test_table_of_an_awkward_number_of_rows() -> None:
    num_tokens = 3 * 1536 + 1
    weight, x = random_codes("int8_per_channel", symmetric=True, num_outputs=num_tokens), random_inputs(2)
    table = ScanTable.from_qtensor(weight)
    last = np.array([num_tokens - 1])
    np.testing.assert_array_equal(table.lookup(last, "float32"), dequantize(weight)[last])
    assert_accumulation_only(project(table, x), x, weight)


def test_dense_table() -> None:
    weight, x = random_inputs(40), random_inputs(3)
    table = DenseTable(weight)
    np.testing.assert_array_equal(table.lookup(np.array([[1, 2]]), "float32"), weight[None, 1:3])
    np.testing.assert_allclose(project(table, x), x.astype(np.float64) @ weight.T, rtol=0, atol=1e-4)


def test_int4_takes_four_bits() -> None:
    weight = random_codes("int4_blockwise", symmetric=True)
    assert ScanLinear.from_qtensor(weight, None).values_BbO.nbytes == NUM_OUTPUTS * NUM_FEATURES // 2
    assert ScanTable.from_qtensor(weight).values_Vc.nbytes == NUM_OUTPUTS * NUM_FEATURES // 2
    assert EinsumLinear.from_qtensor(weight, None).values_GgO.dtype == ml_dtypes.int4


@pytest.mark.parametrize("axis", [0, 1])
def test_every_pair_of_nibbles_survives(axis: int) -> None:
    codes = np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8))).astype(np.int8).reshape(2, 256)
    codes = codes if axis == 0 else codes.T
    halves = unpack_halves(jax.numpy.asarray(pack_halves(codes, axis)))
    np.testing.assert_array_equal(np.concatenate(halves, axis), codes)
