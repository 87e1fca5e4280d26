"""Cycles that the TPU compiler estimates for every form of a product with codes. Needs no TPU.

    python -m benchmarks.tpu_cycles          # v5e and v6e: a quarter of an hour
    python -m benchmarks.tpu_cycles v5e 8    # one chip, one number of rows

A layer is 4096 x 4096, its groups have 128 features, and a stack of layers larger than the chip's fast memory is
scanned, so that codes come from memory as they do in a model. The floor is the time in which memory gives codes and
grids, or the matrix units multiply, whichever is longer. Nothing was executed: these are the compiler's own
estimates, good for telling its forms apart.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from benchmarks.tpu_schedule import CLOCK, ONE_CHIP
from benchmarks.tpu_step import CONTEXTS, LLAMA_2_7B, computations, walk
from llmq.backends.base import ModelOptions
from llmq.backends.tpu import aot
from llmq.backends.tpu.linear import DenseLinear, EinsumLinear, Int8InputLinear, in_runs
from llmq.config import SCHEMES, Granularity, QuantizationConfig
from llmq.plan.chips import CHIPS
from llmq.plan.subject import read_subject

ROWS = (8, 32, 128, 256, 1024)
SIZE, GROUP, NUM_LAYERS = 4096, 128, 24

Linear = DenseLinear | EinsumLinear
Form = Callable[[EinsumLinear, jax.Array], jax.Array]


@dataclass(frozen=True)
class Case:
    """A stack of layers.

    Attributes:
        scheme: Of their codes; None for bfloat16.
        symmetric: Without a zero.
        form: Key of `FORMS`.
    """

    scheme: str | None
    symmetric: bool
    form: str

    def __str__(self) -> str:
        grid = "" if self.scheme is None else " sym" if self.symmetric else " asym"
        return f"{self.scheme or 'bfloat16'}{grid:5}  {self.form}"


def grouped(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    return x_MI.reshape(len(x_MI), linear.scale_GO.shape[0], -1)


def zero_part(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array | float:
    if linear.zero_GO is None:
        return 0.0
    sums_MG = jnp.sum(grouped(linear, x_MI), axis=-1, dtype=jnp.float32)
    return jnp.dot(sums_MG, linear.zero_GO.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def dequantized(linear: EinsumLinear) -> jax.Array:
    weight_GgO = linear.values_GgO.astype(jnp.float32) * linear.scale_GO.astype(jnp.float32)[:, None]
    if linear.zero_GO is not None:
        weight_GgO += linear.zero_GO.astype(jnp.float32)[:, None]
    return weight_GgO.astype(jnp.bfloat16)


def ours(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    return linear(x_MI)


def scale_after(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    codes, x_MGg = linear.values_GgO.astype(x_MI.dtype), grouped(linear, x_MI)
    y_MGO = jnp.einsum("mGg,Ggo->mGo", x_MGg, codes, preferred_element_type=jnp.float32)
    return jnp.sum(y_MGO * linear.scale_GO.astype(jnp.float32), axis=1) + zero_part(linear, x_MI)


def scale_after_flat(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    codes, num_groups = linear.values_GgO.astype(x_MI.dtype), len(linear.scale_GO)
    y_MX = jnp.einsum("mGg,Ggo->mGo", grouped(linear, x_MI), codes).reshape(len(x_MI), -1)
    return jnp.sum(y_MX.reshape(len(x_MI), num_groups, -1) * linear.scale_GO, axis=1) + zero_part(linear, x_MI)


def of_the_predecessor(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    """JetStream-PyTorch's: codes widened to int8, sums of groups in bfloat16."""
    codes, x_BDSc = linear.values_GgO.astype(jnp.int8).astype(x_MI.dtype), grouped(linear, x_MI)[None]
    y_BDZ = jnp.einsum("bdsz,sz->bdz", jnp.einsum("scz,bdsc->bdsz", codes, x_BDSc), linear.scale_GO)
    if linear.zero_GO is not None:
        y_BDZ += jnp.einsum("bdsc,sz->bdz", x_BDSc, linear.zero_GO)
    return y_BDZ[0]


def dequantize_einsum(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    weight_GgO = dequantized(linear)
    return jnp.einsum("mGg,Ggo->mo", grouped(linear, x_MI), weight_GgO, preferred_element_type=jnp.float32)


def zero_by_sums(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    weight_GgO = dequantized(EinsumLinear(linear.values_GgO, linear.scale_GO, None, None))
    x_NrI = in_runs(x_MI)
    x_NrGg = x_NrI.reshape(*x_NrI.shape[:2], *weight_GgO.shape[:2])
    y_NrO = jnp.einsum("NrGg,GgO->NrO", x_NrGg, weight_GgO, preferred_element_type=jnp.float32)
    return y_NrO.reshape(len(x_MI), -1) + zero_part(linear, x_MI)


def dequantize_dot(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    weight_IO = dequantized(linear).reshape(-1, linear.scale_GO.shape[1])
    return jnp.dot(x_MI, weight_IO, preferred_element_type=jnp.float32)


def int8_inputs(linear: EinsumLinear, x_MI: jax.Array) -> jax.Array:
    return Int8InputLinear(linear, None)(x_MI)


OURS = "ours: dequantized in the operand, rows in runs"
INT8_INPUTS = "ours, inputs in int8"
SCALE_AFTER = "einsum a group, then scale"
ZERO_BY_SUMS = "the same, zero by sums of x"
DOT = "dot"
FORMS: dict[str, Form] = {
    OURS: ours,
    DOT: ours,
    "the same, all rows in one run": dequantize_einsum,
    ZERO_BY_SUMS: zero_by_sums,
    SCALE_AFTER: scale_after,
    "einsum a group, flattened, then scale": scale_after_flat,
    "the predecessor's einsum": of_the_predecessor,
    "dequantize, reshape, dot": dequantize_dot,
    INT8_INPUTS: int8_inputs,
}

#: Where there are groups of 4 bits; elsewhere `OURS`, `SCALE_AFTER` and inputs in int8 are told.
BLOCKWISE_INT4 = tuple(form for form in FORMS if form not in (INT8_INPUTS, DOT))


def cases() -> Iterator[Case]:
    yield Case(None, True, DOT)
    for scheme in SCHEMES:
        for symmetric in (True, False):
            forms = BLOCKWISE_INT4 if scheme == "int4_blockwise" else (OURS, SCALE_AFTER)
            for form in forms:
                if not (symmetric and form == ZERO_BY_SUMS):
                    yield Case(scheme, symmetric, form)
            if scheme == "int8_per_channel":
                yield Case(scheme, symmetric, INT8_INPUTS)


def stack(chip: str, case: Case, sharding: SingleDeviceSharding) -> Linear:
    """Types and shapes of all layers."""

    def array(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((NUM_LAYERS, *shape), dtype, sharding=sharding)

    if case.scheme is None:
        return DenseLinear(array(SIZE, SIZE), None)
    row = SCHEMES[case.scheme]
    groups = SIZE // GROUP if row.granularity is Granularity.BLOCKWISE else 1
    grid = array(groups, SIZE)
    codes = array(groups, SIZE // groups, SIZE, dtype=jnp.int4 if row.num_bits == 4 else jnp.int8)
    return EinsumLinear(codes, grid, None if case.symmetric else grid, None, chip)


def cycles(chip: str, case: Case, num_rows: int) -> float:
    """Estimated for one layer."""
    with aot.no_cache():
        sharding = SingleDeviceSharding(aot.find_chips(ONE_CHIP[chip])[0])
        layers, form = stack(chip, case, sharding), FORMS[case.form]

        def run(x_MI: jax.Array, layers: Linear) -> jax.Array:
            return lax.scan(lambda x, layer: (form(layer, x).astype(x.dtype), None), x_MI, layers)[0]

        x_MI = jax.ShapeDtypeStruct((num_rows, SIZE), jnp.bfloat16, sharding=sharding)
        return total(jax.jit(run).lower(x_MI, layers).compile().as_text()) / NUM_LAYERS


def total(text: str, turns: int = 1) -> int:
    """Cycles of a compiled program whose loops of unknown length turn so often."""
    entry, found = computations(text)
    return sum(times * part.cycles for times, part in walk(entry, found, turns))


def floor(chip: str, case: Case, num_rows: int) -> float:
    """Cycles below which no program can be."""
    arrays = jax.tree.leaves(stack(chip, case, SingleDeviceSharding(jax.devices("cpu")[0])))
    num_bits = sum(leaf.size * (4 if leaf.dtype == jnp.int4 else 8 * leaf.dtype.itemsize) for leaf in arrays)
    found = CHIPS[chip]
    return CLOCK[chip] * max(num_bits / 8 / NUM_LAYERS / found.bandwidth, 2 * num_rows * SIZE * SIZE / found.bf16_rate)


def print_chip(chip: str, rows: list[int]) -> None:
    print(f"\n{chip}, {CLOCK[chip] / 1e9} GHz: thousands of cycles a layer")
    print(f"{'rows':70}" + "".join(f"{number:9}" for number in rows), flush=True)
    for case in cases():
        if case.form in (OURS, DOT):
            found = [floor(chip, case, number) / 1e3 for number in rows]
            print(f"{str(case).removesuffix(case.form) + 'floor':70}" + "".join(f"{number:9.1f}" for number in found))
        found = [cycles(chip, case, number) / 1e3 for number in rows]
        print(f"{case!s:70}" + "".join(f"{number:9.1f}" for number in found), flush=True)


def print_step(chip: str) -> None:
    """The decode step of a whole model as serving runs it."""
    print(f"\nLlama-2-7B on {chip}, a decode step of 8 sequences: milliseconds, by positions in use")
    print(f"{'':45}" + "".join(f"{context:9}" for context in CONTEXTS))
    for quantization in (
        QuantizationConfig(scheme="int4_blockwise", group_size=GROUP, symmetric=True),
        QuantizationConfig(scheme="int4_blockwise", group_size=GROUP, symmetric=False),
        QuantizationConfig(scheme="int8_per_channel"),
        QuantizationConfig(scheme="int8_per_channel", activation="int8"),
    ):
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(LLAMA_2_7B))
            subject = read_subject(place)
            weights = subject.outline(subject.quantized(quantization), quantization)
        options = ModelOptions(dtype="bfloat16", num_slots=8, max_len=max(CONTEXTS))
        with aot.no_cache():
            text = aot.lower_steps(weights, ONE_CHIP[chip], options)[1]["decode"]().compile().as_text()
        name = f"{quantization.scheme} {'sym' if quantization.symmetric else 'asym'}, inputs {quantization.activation}"
        times = [1e3 * total(text, context // 128) / CLOCK[chip] for context in CONTEXTS]
        print(f"{name:45}" + "".join(f"{milliseconds:9.1f}" for milliseconds in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("chip", nargs="?", choices=CLOCK)
    parser.add_argument("rows", nargs="*", type=int, default=[*ROWS])
    options = parser.parse_args()
    print(f"jax {version('jax')}, libtpu {version('libtpu')}; estimated by the compiler, not measured")
    for chip in [options.chip] if options.chip else ("v5e", "v6e"):
        print_chip(chip, options.rows or [*ROWS])
    print_step(options.chip or "v5e")


if __name__ == "__main__":
    main()
