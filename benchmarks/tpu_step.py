"""How long a decode step of a whole model takes on one TPU, as far as compilers know. Needs no TPU.

    python -m benchmarks.tpu_step          # Llama-2-7B, int4_blockwise of 128, 8 sequences, v5e

The TPU compiler estimates the cycles of every instruction it makes itself, and nothing of kernels: theirs are read off
their schedules (see `tpu_schedule`), and to those is added what a kernel waits for memory. A loop counts as often as
it turns; the one of attention turns once for every 128 positions in use. Nothing was executed, and nothing in here
knows of what happens between two instructions. For writes into the cache, two scatters of a row for every sequence a
layer, and for looking up the embedding, the compiler gives no estimate: they are missing.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path

from benchmarks.tpu_schedule import CLOCK, ONE_CHIP, Case, Schedule, expected, find_schedules, floor

CHIP, ROWS, GROUP, MAX_LEN = "v5e", 8, 128, 1024
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip

#: The linears of a layer: features, outputs, how many of them.
LINEARS = ((4096, 4096, 4), (4096, 11008, 2), (11008, 4096, 1))

#: Positions in use.
CONTEXTS = (128, 256, 512, 1024)


@dataclass
class Computation:
    """A part of a compiled program.

    Attributes:
        cycles: Of its own instructions, as estimated.
        loops: Body of each loop in it, and its turns; None where they are known when it runs.
        kernels: Calls of kernels.
    """

    cycles: int = 0
    loops: list[tuple[str, int | None]] = field(default_factory=list)
    kernels: int = 0


_BEGIN = re.compile(r"(ENTRY )?%?(\S+) \(.*\{$")
_LOOP = re.compile(r"\bwhile\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")


def computations(text: str) -> tuple[str, dict[str, Computation]]:
    """The parts of a program, by name, and which is the main one."""
    found: dict[str, Computation] = {}
    limits: dict[str, int] = {}  # of a loop's counter, by the name of its condition
    conditions: dict[str, str] = {}
    entry = name = ""
    for line in text.splitlines():
        if begins := _BEGIN.match(line):
            name = begins[2]
            found[name] = Computation()
            entry = name if begins[1] else entry
        elif name:
            part = found[name]
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            part.cycles += int(cycles[1]) if cycles else 0
            part.kernels += 'custom_call_target="tpu_custom_call"' in line
            if limit := _LIMIT.search(line):
                limits[name] = max(limits.get(name, 0), int(limit[1]))
            if loop := _LOOP.search(line):
                conditions[loop[2]] = loop[1]
                part.loops.append((loop[2], None))
    for part in found.values():
        part.loops = [(body, limits.get(conditions[body])) for body, _ in part.loops]
    return entry, found


def walk(name: str, found: dict[str, Computation], blocks: int, times: int = 1) -> Iterator[tuple[int, Computation]]:
    """Every part that runs, and how often."""
    yield times, found[name]
    for body, turns in found[name].loops:
        yield from walk(body, found, blocks, times * (blocks if turns is None else turns))


def compiled_step(kernel: str | None, kv_int8: bool) -> str:
    """The decode step of `LLAMA_2_7B` as serving runs it, compiled."""
    from llmq.backends.base import ModelOptions
    from llmq.backends.tpu import aot
    from llmq.config import QuantizationConfig
    from llmq.plan.subject import read_subject

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(LLAMA_2_7B))
        subject = read_subject(place)
        quantization = QuantizationConfig(scheme="int4_blockwise", group_size=GROUP, symmetric=False)
        weights = subject.outline(subject.quantized(quantization), quantization)
    options = ModelOptions(dtype="bfloat16", num_slots=ROWS, max_len=MAX_LEN, kv_int8=kv_int8, kernel=kernel)
    with aot.no_cache():
        return aot.lower_steps(weights, ONE_CHIP[CHIP], options)[1]["decode"]().compile().as_text()


def inside_kernels() -> dict[str, float]:
    """Cycles of all kernels of a step: as scheduled, with waiting for memory, and to read the codes."""
    cases = {Case(ROWS, features, outputs, GROUP, 4, False): number for features, outputs, number in LINEARS}
    totals = {"scheduled": 0.0, "with waiting for memory": 0.0, "reading the codes alone": 0.0}
    for case, schedule in find_schedules(CHIP, list(cases)):
        assert isinstance(schedule, Schedule), schedule
        cycles = (schedule.cycles, expected(CHIP, case, schedule), floor(CHIP, case))
        for name, one in zip(totals, cycles, strict=True):
            totals[name] += LLAMA_2_7B["num_hidden_layers"] * cases[case] * one
    return totals


def milliseconds(cycles: float) -> float:
    return cycles / CLOCK[CHIP] * 1e3


def main() -> None:
    print(f"Llama-2-7B, int4_blockwise of {GROUP} with zeros, {ROWS} sequences, {CHIP} at {CLOCK[CHIP] / 1e9} GHz")
    print(f"jax {version('jax')}, libtpu {version('libtpu')}; estimated and scheduled, not measured; milliseconds\n")
    inside = inside_kernels()
    num_kernels = LLAMA_2_7B["num_hidden_layers"] * sum(number for *_, number in LINEARS)
    print(f"the {num_kernels} kernels: " + ", ".join(f"{name} {milliseconds(one):.2f}" for name, one in inside.items()))
    print(f"\n{'':34}" + "".join(f"{context:>9}" for context in CONTEXTS) + "  positions in use")
    for kv, kernel in product(("bfloat16", "int8"), ("pallas", None)):
        entry, found = computations(compiled_step(kernel, kv == "int8"))
        assert sum(times * part.kernels for times, part in walk(entry, found, 1)) == (num_kernels if kernel else 0)
        outside = [sum(times * part.cycles for times, part in walk(entry, found, one // 128)) for one in CONTEXTS]
        added = inside["with waiting for memory"] if kernel else 0.0
        for name, extra in (("outside", 0.0), ("step", added)) if kernel else (("step", 0.0),):
            title = f"cache {kv}, kernel {kernel or 'none'}, {name}"
            print(f"{title:34}" + "".join(f"{milliseconds(one + extra):9.2f}" for one in outside), flush=True)


if __name__ == "__main__":
    main()
