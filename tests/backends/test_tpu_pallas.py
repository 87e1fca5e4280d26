"""The Pallas kernel: in JAX's interpreter against float64, and through the real TPU compiler."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.tpu_schedule import Case, Schedule, find_schedules, floor
from llmq.backends.base import ModelOptions
from llmq.backends.registry import load_backend
from llmq.backends.tpu import aot, pallas
from llmq.backends.tpu.cache import empty_cache
from llmq.backends.tpu.linear import EinsumLinear
from llmq.backends.tpu.load import ACCELERATOR_LAYOUTS, Layouts, load_params
from llmq.backends.tpu.mesh import make_mesh
from llmq.backends.tpu.model import decode
from llmq.backends.tpu.pallas import PallasLayout, PallasLinear, Tiles, at_layer, find_tiles, matmul
from llmq.checkpoint.loader import load_weights
from llmq.config import SCHEMES, Granularity, QuantizationConfig
from llmq.errors import BackendError, ConfigError
from llmq.plan.memory import bytes_per_token
from llmq.plan.run import PlanOptions, make_plan
from llmq.plan.subject import read_subject
from llmq.quant import QTensor, quantize
from tests.backends.bounds import assert_accumulation_only
from tests.backends.quantized import QuantizedWeights
from tests.plan.test_plan import LLAMA_2_7B
from tests.tiny import tiny_config, write_tiny

needs_compiler = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'llmq[tpu]'")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in Pallas' interpreter, and float32 products are of full precision."""
    monkeypatch.setattr(pallas.pl, "pallas_call", partial(pallas.pl.pallas_call, interpret=True))
    with jax.default_matmul_precision("highest"):
        yield


def random_codes(
    scheme: str, symmetric: bool, group_size: int, shape: tuple[int, int] = (256, 256), offset: float = 0.0
) -> QTensor:
    row = SCHEMES[scheme]
    changes = {"symmetric": symmetric}
    if row.granularity is Granularity.BLOCKWISE:
        changes["group_size"] = group_size
    weight = np.random.default_rng(0).standard_normal(shape) + offset
    return quantize(weight.astype(ml_dtypes.bfloat16), row.model_copy(update=changes))


def random_inputs(num_rows: int, num_features: int = 256, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(num_rows).standard_normal((num_rows, num_features)).astype(dtype)


def apply(weight: QTensor, x: np.ndarray, chip: str = "v5e", bias: np.ndarray | None = None) -> np.ndarray:
    """The product with the second layer of three; the others are not finite."""
    linear = PallasLayout(chip).from_qtensor(weight, bias)
    assert isinstance(linear, PallasLinear)

    def between(leaf: np.ndarray) -> np.ndarray:
        other = np.full_like(leaf, 7 if leaf.dtype in (ml_dtypes.int4, np.int8) else np.nan)
        return np.stack([other, leaf, other])

    stack = jax.tree.map(between, linear)
    return np.asarray(jax.jit(lambda stack, x: at_layer(stack, jnp.int32(1))(x))(stack, x))


@pytest.mark.parametrize(
    ("scheme", "symmetric", "group_size"),
    [
        ("int4_blockwise", True, 128),
        ("int4_blockwise", False, 32),
        ("int8_blockwise", False, 64),
        ("int8_blockwise", True, 256),
        ("int8_per_channel", True, 0),
        ("int4_per_channel", False, 0),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_product_errs_by_accumulation_only(scheme: str, symmetric: bool, group_size: int) -> None:
    num_features = 512 if group_size == 256 else 256
    weight = random_codes(scheme, symmetric, group_size, (256, num_features))
    x = random_inputs(9, num_features)
    assert_accumulation_only(apply(weight, x), x, weight)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(("num_rows", "group_size"), [(3, 64), (40, 64)])
@pytest.mark.usefixtures("interpreted")
def test_bfloat16(num_rows: int, group_size: int, chip: str) -> None:
    """Few rows meet the codes themselves, many meet them scaled."""
    weight = random_codes("int4_blockwise", False, group_size)
    x = random_inputs(num_rows, dtype="bfloat16")
    y = apply(weight, x, chip)
    assert y.dtype == ml_dtypes.bfloat16
    assert_accumulation_only(y, x, weight, bfloat16=True)


@pytest.mark.usefixtures("interpreted")
def test_weights_far_from_zero() -> None:
    """The sums of x go through the matrix unit in bfloat16, in as many parts as a float32 has."""
    weight, x = random_codes("int4_blockwise", False, 128, offset=50.0), random_inputs(3)
    assert_accumulation_only(apply(weight, x), x, weight)


@pytest.mark.usefixtures("interpreted")
def test_bias() -> None:
    weight, x = random_codes("int4_blockwise", True, 128), random_inputs(2)
    bias = np.linspace(-3, 3, 256).astype(ml_dtypes.bfloat16)
    assert_accumulation_only(apply(weight, x, bias=bias), x, weight, bias.astype(np.float64))


@pytest.mark.usefixtures("interpreted")
def test_rows_of_several_programs_and_a_last_tile_that_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas, "MAX_ROWS", 8)
    monkeypatch.setattr(pallas, "find_tiles", lambda *_: Tiles(256, 2))
    weight, x = random_codes("int4_blockwise", False, 128, (384, 256)), random_inputs(17)
    assert_accumulation_only(apply(weight, x), x, weight)


@pytest.mark.parametrize(
    ("scheme", "group_size", "shape"),
    [("int4_blockwise", 64, (128, 576)), ("int4_blockwise", 64, (96, 256)), ("int8_per_channel", 0, (128, 576))],
)
def test_what_it_cannot_cut_keeps_the_product_of_the_compiler(scheme: str, group_size: int, shape: tuple) -> None:
    linear = PallasLayout("v5e").from_qtensor(random_codes(scheme, True, group_size, shape), None)
    assert isinstance(linear, EinsumLinear)


def test_tiles_divide_whatever_the_shape() -> None:
    for chip in ("v5e", "v6e", "v5p", "another"):
        for num_features in (128, 384, 4096, 11008, 14336, 28672):
            for group_size in (32, 128, 256, num_features):
                if num_features % group_size:
                    continue
                columns, blocks = find_tiles(chip, 8, num_features, 640, group_size)
                size = 128 if group_size == num_features else max(128, group_size)
                assert columns <= 640
                assert columns % 128 == 0
                assert num_features // size % blocks == 0


@pytest.mark.usefixtures("interpreted")
def test_a_model_decodes_as_with_the_products_of_the_compiler(tmp_path: Path) -> None:
    """Two structures of layers: each is a stack of its own, with its own indices."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    weights = load_weights(str(write_tiny(tmp_path / "model", **sizes, **heads)))
    schemes = {"0": "int8_per_channel"}

    def scheme(name: str):
        return SCHEMES[schemes.get(name.split(".")[2], "int4_blockwise")] if ".layers." in name else None

    quantized = QuantizedWeights(weights, lambda name: scheme(name) and _with_groups(scheme(name)))
    mesh = make_mesh(jax.devices("cpu"), 1, 1)
    ids = np.array([3, 5], np.int32)

    def logits(layouts: Layouts) -> np.ndarray:
        params, _ = load_params(quantized, layouts, "float32", 128, mesh)
        cache = empty_cache(weights.config, 2, 128, "float32")
        for position in range(2):
            at = np.full(2, position, np.int32)
            cache, found = decode(weights.config, "float32", params, cache, ids, at, np.ones(2, bool))
        return np.asarray(found)

    with_kernel = logits(replace(ACCELERATOR_LAYOUTS, linear=PallasLayout("v5e")))
    np.testing.assert_allclose(with_kernel, logits(ACCELERATOR_LAYOUTS), rtol=0, atol=1e-4)


def _with_groups(scheme):
    blockwise = scheme.granularity is Granularity.BLOCKWISE
    return scheme.model_copy(update={"group_size": 64}) if blockwise else scheme


class TestRefused:
    @pytest.mark.parametrize(
        ("backend", "says"),
        [
            ("tpu", "kernel='pallas': runs on a TPU, and the device here is a cpu; leave --kernel out"),
            ("gpu", "kernel='pallas': is a kernel for TPUs; leave --kernel out"),
            ("reference", "kernel='pallas': the reference has no kernels"),
        ],
    )
    def test_where_there_is_no_tpu(self, backend: str, says: str, tmp_path: Path) -> None:
        weights = load_weights(str(write_tiny(tmp_path / "model")))
        with pytest.raises(BackendError, match=says):
            load_backend(backend).open_model(weights, ModelOptions(device="cpu", kernel="pallas"))

    def test_without_a_compiler_to_ask(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
        with pytest.raises(ConfigError, match="kernel='pallas': is of what is compiled; add --compile"):
            make_plan(str(tmp_path), None, PlanOptions(kernel="pallas"))

    @needs_compiler
    def test_several_chips(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
        with pytest.raises(BackendError, match="runs on one device, and 4 are to share"):
            make_plan(str(tmp_path), None, PlanOptions(targets=("v5e:2x2",), tp=1, kernel="pallas", compile=True))


@pytest.mark.tpu_aot
@pytest.mark.slow
@needs_compiler
class TestCompiler:
    @pytest.mark.parametrize("target", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1"])
    def test_takes_every_form(self, target: str) -> None:
        with aot.no_cache():
            sharding = jax.sharding.SingleDeviceSharding(aot.find_chips(target)[0])
            array = partial(jax.ShapeDtypeStruct, sharding=sharding)
            for num_bits, group_size, zeros, num_rows, dtype in (
                (4, 128, False, 8, jnp.bfloat16),
                (4, 32, True, 8, jnp.bfloat16),
                (8, 64, True, 64, jnp.bfloat16),
                (8, 1024, True, 300, jnp.bfloat16),
                (4, 128, True, 8, jnp.float32),
            ):
                codes = array((2, 8, 128, 640), jnp.int4 if num_bits == 4 else jnp.int8)
                grid = array((2, 1024 // group_size, 640), jnp.bfloat16)
                run = partial(matmul, group_size=group_size, chip=target.partition(":")[0])
                x, layer = array((num_rows, 1024), dtype), array((), jnp.int32)
                jax.jit(run).lower(x, codes, grid, grid if zeros else None, layer).compile()

    def test_a_whole_step_copies_no_weights(self, tmp_path: Path) -> None:
        """Nor their grids: 86 groups of 128 are no whole tiles of memory."""
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
        subject = read_subject(str(tmp_path))
        quantization = QuantizationConfig(scheme="int4_blockwise", group_size=128, symmetric=False)
        weights = subject.outline(subject.quantized(quantization), quantization)
        options = ModelOptions(dtype="bfloat16", num_slots=8, max_len=256, kernel="pallas")
        with aot.no_cache():
            _, programs = aot.lower_steps(weights, "v5e:1x1", options)
            compiled = programs["decode"]().compile()
        memory = compiled.memory_analysis()
        cache = 8 * 256 * bytes_per_token(subject.config, "bfloat16")
        assert memory.temp_size_in_bytes < 4 << 20
        assert memory.argument_size_in_bytes == pytest.approx(weights.num_bytes + cache, rel=0.02)
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 7

    def test_the_schedule_stays_as_short(self) -> None:
        """Cycles over those of reading the codes; what limits a longer one stands in the dated tables of benchmarks."""
        limits = {
            "v5e": {
                Case(8, 4096, 4096): 1.05,
                Case(16, 4096, 11008, symmetric=False): 1.1,
                Case(32, 11008, 4096, symmetric=False): 1.08,
            },
            "v6e": {Case(8, 4096, 4096): 0.94, Case(8, 4096, 4096, 32, 8): 0.68},
        }
        for chip, cases in limits.items():
            for case, found in find_schedules(chip, list(cases)):
                assert isinstance(found, Schedule), found
                assert found.cycles / floor(chip, case) < cases[case], (chip, case)
