"""How long the TPU compiler's own schedule of the Pallas kernel is, against reading the codes once. Needs no TPU.

    python -m benchmarks.tpu_schedule                     # the table, for v5e and v6e
    python -m benchmarks.tpu_schedule --tune v5e v6e v5p  # which tiles to take, for llmq/backends/tpu/pallas.py

The compiler writes out what each unit of the chip does in each cycle, one *bundle* of instructions a cycle. A
kernel takes as many cycles as it has bundles, those in loops once for each turn, if it never waits for memory.
It waits for as long as reading takes longer: `floor` is the time to read the codes at the full bandwidth, and
`ratio` the scheduled cycles over it. Under 1 reading alone limits the kernel, if it is overlapped as planned.
Nothing was executed: the schedule knows of no latency of memory, and of nothing else that runs on the chip.

`busy` are the shares of slots in use, over all bundles, of the two kinds that are used most.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

from llmq.plan.chips import CHIPS

ROOT = Path(__file__).parent.parent

#: Cycles a second: the maker's bfloat16 rate over what its matrix units multiply in a cycle (v5e: four of 128 x 128;
#: v6e: two of 256 x 256 in each of two halves of a cycle; v5p: eight of 128 x 128, on two cores).
CLOCK = {"v5e": 1.50e9, "v6e": 1.75e9, "v5p": 1.75e9}

#: As the compiler calls one chip.
ONE_CHIP = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "v5p": "v5p:1x1x1"}

#: The linears of a model: name -> features and outputs.
SHAPES = {
    "Llama-2-7B q, k, v": (4096, 4096),
    "Llama-2-7B o": (4096, 4096),
    "Llama-2-7B gate, up": (4096, 11008),
    "Llama-2-7B down": (11008, 4096),
    "Llama-3-8B q, o": (4096, 4096),
    "Llama-3-8B k, v": (4096, 1024),
    "Llama-3-8B gate, up": (4096, 14336),
    "Llama-3-8B down": (14336, 4096),
}
ROWS = (8, 16, 32, 64)
GROUPS = (128, 64, 32)
TUNED_ROWS = (8, 16, 32, 64, 256)
TUNED_COLUMNS = (256, 512, 1024)
TUNED_BLOCKS = (1, 2, 4, 7, 8, 14, 16, 32, 43)


@dataclass(frozen=True)
class Case:
    """A product.

    Attributes:
        rows, features, outputs: M, I and O.
        group_size: Features that share a scale.
        bits: Of a code.
        symmetric: Whether there are no zeros.
        columns, blocks: Of the tiles; 0 takes the table's.
    """

    rows: int
    features: int
    outputs: int
    group_size: int = 128
    bits: int = 4
    symmetric: bool = True
    columns: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Schedule:
    """What the compiler made of a kernel.

    Attributes:
        columns, blocks: Of the tiles that it was compiled with.
        tiles: How many.
        once: Bundles outside of all loops, and of the two turns that the loop over tiles has more than tiles: nothing
            is computed in them.
        around: Bundles of a tile outside of its inner loop.
        turn: Bundles of a turn of the inner loop.
        turns: Of the inner loop.
        busy: Kind of slot -> share in use over all bundles of a tile.
    """

    columns: int
    blocks: int
    tiles: int
    once: int
    around: int
    turn: int
    turns: int
    busy: dict[str, float]

    @property
    def tile(self) -> int:
        """Bundles of a tile."""
        return self.around + self.turn * self.turns

    @property
    def cycles(self) -> int:
        """Of the kernel, if it never waits."""
        return self.once + self.tile * self.tiles


def floor(chip: str, case: Case) -> float:
    """Cycles to read the codes, and nothing else, at full bandwidth."""
    return case.features * case.outputs * case.bits / 8 / CHIPS[chip].bandwidth * CLOCK[chip]


def expected(chip: str, case: Case, schedule: Schedule) -> float:
    """Cycles with reading: the first tile's is waited for, later ones are read while the tile before is computed."""
    grids = (1 if case.symmetric else 2) * 16 / case.group_size
    reading = floor(chip, case) * (1 + grids / case.bits) / (case.outputs / schedule.columns)
    return schedule.once + reading + max(reading, schedule.tile) * schedule.tiles


def find_schedules(chip: str, cases: Sequence[Case]) -> Iterator[tuple[Case, Schedule | str]]:
    """Compile kernels in a process of their own: the compiler reads its flags when it is loaded.

    Yields:
        Each case and its schedule, or why there is none.
    """
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "benchmarks.tpu_schedule", "--worker", chip, place]
        with subprocess.Popen(
            command, cwd=ROOT, env=dump_environment(place), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as worker:
            assert worker.stdin
            assert worker.stdout
            for case in cases:
                worker.stdin.write(json.dumps(asdict(case)) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if not line:
                    raise RuntimeError(f"{chip}: the compiler ended at {case}")
                found = json.loads(line)
                yield case, found if isinstance(found, str) else Schedule(**found)


def dump_environment(place: str) -> dict[str, str]:
    """In which the TPU compiler writes its schedules to a directory."""
    flags = f"--xla_jf_dump_to={place} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags}


def work(chip: str, place: Path) -> None:
    """Cases as lines of JSON in, schedules out."""
    import jax

    from llmq.backends.tpu import aot

    with aot.no_cache():
        sharding = jax.sharding.SingleDeviceSharding(aot.find_chips(ONE_CHIP[chip])[0])
        for line in sys.stdin:
            case = Case(**json.loads(line))
            for path in place.iterdir():
                path.unlink()
            try:
                found = asdict(compile_case(chip, case, sharding, place))
            except jax.errors.JaxRuntimeError as err:
                found = str(err).strip().splitlines()[0][:200]
            print(json.dumps(found), flush=True)


def compile_case(chip: str, case: Case, sharding: object, place: Path) -> Schedule:
    """The kernel as the model calls it, with two layers."""
    import jax
    import jax.numpy as jnp

    from llmq.backends.tpu.pallas import Tiles, find_tiles, matmul

    def array(*shape: int, dtype: object) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    size = max(128, case.group_size)
    codes = array(2, case.features // size, size, case.outputs, dtype=jnp.int4 if case.bits == 4 else jnp.int8)
    grid = array(2, -(-case.features // case.group_size // 8) * 8, case.outputs, dtype=jnp.bfloat16)
    tiles = (
        Tiles(case.columns, case.blocks)
        if case.columns
        else find_tiles(chip, case.rows, case.features, case.outputs, case.group_size)
    )
    x = array(case.rows, case.features, dtype=jnp.bfloat16)
    zero = None if case.symmetric else grid
    step = jax.jit(lambda *arrays: matmul(*arrays, case.group_size, chip, tiles))
    step.lower(x, codes, grid, zero, array(dtype=jnp.int32)).compile()
    return read_schedule(place, "_matmul", -(-case.outputs // tiles.columns), case.features // size, tiles)


def read_schedule(place: Path, name: str, tiles: int, blocks: int, cut: tuple[int, int]) -> Schedule:
    """What the compiler wrote of the one kernel of that name."""
    (bundles,) = (path for path in place.glob(f"*{name}*-final_bundles.txt") if "analysis" not in path.name)
    (slots,) = place.glob(f"*{name}*-final_hlo-static-per-bundle-utilization.txt")
    depths = [match[1].count(">") for match in _BUNDLE.finditer(bundles.read_text())]
    kinds, capacity, used = read_slots(slots.read_text())
    turns = blocks // cut[1]
    # Of loops with a single turn nothing is left.
    loops = [number for number in (tiles, turns) if number > 1]
    assert max(depths) <= len(loops), (bundles.name, max(depths), loops)
    turned = [[1, tiles, tiles * turns] if tiles > 1 else [1, turns]][0]
    counts = [depths.count(depth) for depth in range(3)]
    once, around, turn = counts if tiles > 1 else (0, *counts[:2])
    computing = [kinds.index(kind) for kind in ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VSTORE")]
    idle = [depth == 1 and not any(row[kind] for kind in computing) for depth, row in zip(depths, used, strict=True)]
    once += 2 * sum(idle) if tiles > 1 else 0
    inside = [(turned[depth], row) for depth, row in zip(depths, used, strict=True) if depth or tiles == 1]
    total = sum(weight for weight, _ in inside)
    shares = {
        kind: round(sum(weight * row[column] for weight, row in inside) / total / capacity[column], 3)
        for column, kind in enumerate(kinds)
    }
    return Schedule(*cut, tiles, once, around, turn, turns if turn else 1, shares)


#: Address, a mark of what begins there, a > for each loop around it.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2})?:((?: *>)*) *\{", re.MULTILINE)


def read_slots(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    """Kinds of slots, how many a bundle has, and how many each bundle uses."""
    head, _, body = text.partition("== UTILIZATION:\n")
    names, numbers = (line for line in head.splitlines() if line and not line.startswith("=="))
    rows = [[int(number) for number in line.split()] for line in body.strip().splitlines()]
    return names.replace(",", " ").split(), [int(number) for number in numbers.split()], rows


def busiest(schedule: Schedule) -> str:
    """The two kinds of slots that limit."""
    kinds = sorted(schedule.busy, key=lambda kind: -schedule.busy[kind])[:2]
    return ", ".join(f"{kind} {schedule.busy[kind]:.0%}" for kind in kinds)


def print_table(chips: Sequence[str]) -> None:
    print(f"jax {version('jax')}, libtpu {version('libtpu')}; scheduled by the compiler, not measured\n")
    names: dict[tuple[int, int], list[str]] = {}
    for name, shape in SHAPES.items():
        names.setdefault(shape, []).append(name)
    for chip in chips:
        print(f"{chip}, {CHIPS[chip].bandwidth / 1e9:.0f} GB/s, {CLOCK[chip] / 1e9} GHz\n")
        grid = product(names, (4, 8), GROUPS, (True, False), ROWS)
        cases = [with_tiles(chip, Case(rows, *shape, group, bits, sym)) for shape, bits, group, sym, rows in grid]
        found = dict(find_schedules(chip, list(dict.fromkeys(map(of_four_tiles, cases)))))
        for shape, called in names.items():
            print(f"{chip} {shape[0]} x {shape[1]} ({'; '.join(called)})\n{COLUMNS}")
            for case in cases:
                if (case.features, case.outputs) == shape:
                    print(row(chip, case, as_many_tiles(case, found[of_four_tiles(case)])))
            print(flush=True)


COLUMNS = (
    f"{'rows':>4} {'group':>5} {'codes':>5} {'zeros':>5} {'tile':>13} {'bundles x tiles':>15} "
    f"{'cycles':>8} {'floor':>8} {'ratio':>5}  busy"
)


def with_tiles(chip: str, case: Case) -> Case:
    """The case with the tiles of the table."""
    from llmq.backends.tpu.pallas import find_tiles

    columns, blocks = find_tiles(chip, case.rows, case.features, case.outputs, case.group_size)
    return replace(case, columns=columns, blocks=blocks)


def of_four_tiles(case: Case) -> Case:
    """What is compiled for it: a tile costs the same whatever their number."""
    return replace(case, outputs=4 * case.columns)


def as_many_tiles(case: Case, found: Schedule | str) -> Schedule:
    """The schedule of a case from that of its four tiles."""
    assert isinstance(found, Schedule), (case, found)
    return replace(found, tiles=-(-case.outputs // case.columns))


def row(chip: str, case: Case, found: Schedule) -> str:
    ratio = found.cycles / floor(chip, case)
    zeros = "no" if case.symmetric else "yes"
    tile = f"{case.features}x{found.columns}/{found.blocks}"  # features, columns, and blocks of a turn of the loop
    return (
        f"{case.rows:4} {case.group_size:5} {f'int{case.bits}':>5} {zeros:>5} {tile:>13} {found.tile:>8} x {found.tiles:<4} "
        f"{found.cycles:8} {floor(chip, case):8.0f} {ratio:5.2f}  {busiest(found)}"
    )


def tune(chips: Sequence[str]) -> None:
    """The tiles with the fewest expected cycles, for int4 with zeros; a tile costs the same whatever their number."""
    outputs: dict[int, set[int]] = {}
    for features, number in SHAPES.values():
        outputs.setdefault(features, set()).add(number)
    for chip, features, group, rows in product(chips, outputs, GROUPS, TUNED_ROWS):
        grid = [
            of_four_tiles(Case(rows, features, 0, group, 4, False, columns, blocks))
            for columns, blocks in product(TUNED_COLUMNS, TUNED_BLOCKS)
            if features // 128 % blocks == 0 and 32 <= blocks * columns // 16 <= 1024
        ]
        found = [(case, one) for case, one in find_schedules(chip, grid) if isinstance(one, Schedule)]
        for number in sorted(outputs[features]):
            cases = [(replace(case, outputs=number), one) for case, one in found if case.columns <= number]
            ranked = sorted(
                (expected(chip, case, as_many_tiles(case, one)) / floor(chip, case), case.columns, case.blocks)
                for case, one in cases
            )
            print(chip, rows, features, number, group, *(f"{c}x{b}: {ratio:.3f}" for ratio, c, b in ranked), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", nargs="+", choices=CLOCK)
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]))
    elif options.tune:
        tune(options.tune)
    else:
        print_table(("v5e", "v6e"))


if __name__ == "__main__":
    main()
