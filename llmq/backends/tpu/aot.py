"""The real TPU compiler, for a chip that need not be there: what it makes of the steps that serving runs.

Nothing is executed, so there are no times of a step in here; what there is, is what the compiler says: the
memory a step takes, the collectives in it, and whether it writes weights out in a wider type.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from llmq.backends.base import CompiledStep, ModelOptions
from llmq.backends.tpu.cache import Place, empty_cache
from llmq.backends.tpu.device import Device, configure
from llmq.backends.tpu.load import accelerator_layouts, outline_params
from llmq.backends.tpu.mesh import make_mesh, params_specs
from llmq.backends.tpu.model import Params, decode, forward, logits
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError

#: Not split.
WHOLE = P()

#: Tokens of a prompt that are compiled for.
CHUNK = 256

#: Keeps libtpu from asking the cloud which machine this is, and from taking chips that it only compiles for: it
#: leaves a lock behind when it is killed, and knows of no other process that compiles.
_MACHINE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def compile_steps(weights: ModelWeights, target: str, options: ModelOptions) -> list[CompiledStep]:
    """See `base.Planner.compile_steps`.

    Args:
        weights: The model.
        target: Chips.
        options: Slots, context, types, and how the chips share the model.

    Returns:
        A row for each program.

    Raises:
        BackendError: The compiler is not installed, or does not know the target.
    """
    with no_cache():
        params, programs = lower_steps(weights, target, options)
        return [_compile(name, lower, params) for name, lower in programs.items()]


def lower_steps(
    weights: ModelWeights, target: str, options: ModelOptions
) -> tuple[Params, dict[str, Callable[[], jax.stages.Lowered]]]:
    """The programs that serving runs, for chips that need not be there.

    Args:
        weights: The model.
        target: Chips.
        options: As for `compile_steps`.

    Returns:
        Types and shapes of the weights, and what lowers each program, by its name.

    Raises:
        BackendError: The compiler is not installed, does not know the target, or has no such kernel for it.
    """
    dtype = options.dtype or "bfloat16"
    config = weights.config
    mesh = make_mesh(find_chips(target), options.dp, options.tp, config.num_kv_heads, options.sp)

    def array(*shape: int, dtype: Any = jnp.int32, spec: P = WHOLE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def placed(tree: Any, specs: Any) -> Any:
        return jax.tree.map(lambda leaf, spec: array(*leaf.shape, dtype=leaf.dtype, spec=spec), tree, specs)

    layouts = accelerator_layouts(mesh.devices.flat[0], mesh.size, options.kernel)
    params = outline_params(weights, layouts, dtype, options.max_len)
    params = placed(params, params_specs(params, options.tp, config.num_kv_heads))
    cache_type = "int8" if options.kv_int8 else dtype
    cache = jax.eval_shape(partial(empty_cache, config, options.num_slots, options.max_len, cache_type, mesh))
    cache = placed(cache, cache.specs)
    of_slots, active = array(options.num_slots), array(options.num_slots, dtype=jnp.bool)
    tokens, one = array(1, CHUNK), array()
    place = Place(one, tokens, tokens, tokens, tokens, one)
    hidden = array(1, CHUNK, config.hidden_size, dtype=jnp.dtype(dtype))
    return params, {
        "decode": partial(decode.lower, config, dtype, params, cache, of_slots, of_slots, active),
        f"prefill of {CHUNK}": partial(forward.lower, config, dtype, params, cache, tokens, place),
        f"head of {CHUNK}": partial(logits.lower, dtype, params, hidden),
    }


@contextmanager
def no_cache() -> Generator[None]:
    """JAX cannot read back what it compiled for a chip that is not there, but would keep it.

    Yields:
        While nothing is kept.
    """
    configure()
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def find_chips(target: str) -> list[Device]:
    """Chips to compile for.

    Args:
        target: As in ``v5e:2x4``.

    Returns:
        All of them; nothing can be put there.

    Raises:
        BackendError: The compiler is not installed, or does not know the target.
    """
    if find_spec("libtpu") is None:
        raise BackendError("compile: needs the TPU compiler, which is not installed; pip install 'llmq[tpu]'.")
    for name, value in _MACHINE.items():
        os.environ.setdefault(name, value)
    shape = [int(size) for size in target.partition(":")[2].split("x")]
    bounds = (*shape, 1, 1)[:3]
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=target, chips_per_host_bounds=bounds)
    except Exception as err:  # of whatever type: it comes from the compiler's plugin
        reason = str(err).strip().splitlines()[0][:200]
        raise BackendError(f"target={target!r}: the TPU compiler here does not take it ({reason}).") from err
    return list(found.devices)


def _compile(name: str, lower: Any, params: Params) -> CompiledStep:
    start = time.perf_counter()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as err:
        missing = exceeded(str(err))
        if missing is None:
            raise
        return CompiledStep(name, time.perf_counter() - start, missing_bytes=missing)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return CompiledStep(
        name=name,
        seconds=time.perf_counter() - start,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=collectives(text),
        widened=tuple(widened(text, _forms(params))),
    )


def exceeded(message: str) -> int | None:
    """By how much a program exceeds the chip's memory.

    Args:
        message: Of the compiler.

    Returns:
        Bytes, to the compiler's two digits; None when it complains of something else.
    """
    found = re.search(r"\(([0-9.]+)([KMGT]?)\) exceeds available HBM \(([0-9.]+)([KMGT]?)\)", message)
    return found and math.ceil(float(found[1]) * _UNITS[found[2]] - float(found[3]) * _UNITS[found[4]])


_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")

#: Instructions that give a value no memory of its own.
_FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (\w+)\[([\d,]*)\]\S* ([\w\-]+)\(")


def collectives(text: str) -> dict[str, int]:
    """Collectives of a compiled program.

    Args:
        text: The program.

    Returns:
        Kind -> how many, none left out that is there; as ``all-reduce a layer`` for those of a loop.
    """
    found, where = Counter[str](), ""
    for line in text.splitlines():
        if _begins(line):
            where = "" if line.startswith("ENTRY") else " a layer"
        found.update(f"{kind}{where}" for kind in _COLLECTIVE.findall(line))
    return dict(found)


def _begins(line: str) -> bool:
    """Whether a line begins a computation."""
    return line.endswith("{") and "=" not in line.partition("(")[0]


def widened(text: str, forms: set[tuple[int, ...]]) -> Iterator[str]:
    """Weights that a compiled program writes out as floating point.

    Args:
        text: The program.
        forms: Shapes that a weight may have, without axes of one.

    Yields:
        As in ``bf16[4096,4096] of convert.3``.
    """
    inside_fusion = False
    for line in text.splitlines():
        if _begins(line):
            inside_fusion = "fused_computation" in line
        found = _INSTRUCTION.match(line)
        if inside_fusion or found is None or found[4] in _FREE or found[2] not in ("bf16", "f32", "f16"):
            continue
        if tuple(int(size) for size in found[3].split(",") if size not in ("", "1")) in forms:
            yield f"{found[2]}[{found[3]}] of {found[1]}"


def _forms(params: Params) -> set[tuple[int, ...]]:
    """Of every matrix that is stored as codes: as it lies, with its groups joined, turned, and flat; in stacks too."""
    matrices = [((), shape) for table in (params.embedding, params.head) for shape in _codes(table)]
    for num_layers, *groups, num_outputs in _codes(params.segments):
        for shape in ((*groups, num_outputs), (math.prod(groups), num_outputs)):
            matrices += [((), shape), ((num_layers,), shape)]
    turned = [(stack, (*shape[-1:], *shape[:-1])) for stack, shape in matrices]
    flat = [((), (math.prod(stack) * math.prod(shape),)) for stack, shape in matrices]
    return {tuple(size for size in (*stack, *shape) if size > 1) for stack, shape in (*matrices, *turned, *flat)}


def _codes(tree: Any) -> list[tuple[int, ...]]:
    """Shapes of a chip's part of all codes."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype in (jnp.int4, jnp.int8)]
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
