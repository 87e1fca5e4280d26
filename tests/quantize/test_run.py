"""Whole runs on a tiny model: the same bytes however they come about, and what is refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmq.backends.base import ModelOptions, Stream
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.record import read_record
from llmq.config import Override, QuantizationConfig
from llmq.convert import ConversionPlan, convert, plan_conversion
from llmq.errors import CheckpointError, ConfigError, OutputError
from llmq.model.names import STAGES, Kind
from llmq.model.tokenizer import Tokenizer
from llmq.quant import QTensor
from llmq.quantize import blocks
from llmq.quantize.blocks import QuantizedBlock, read_block
from llmq.quantize.bounded import Round, best_round, measure_artifact, next_planned, quantize_to_divergence
from llmq.quantize.data import calibration_sequences
from llmq.quantize.mixed import plan_mixed
from llmq.quantize.options import ALGORITHMS, QuantizeOptions, Target
from llmq.quantize.run import quantize
from llmq.quantize.setup import Run
from tests.tiny import byte_tokenizer_files, random_tensors, tiny_config, write_checkpoint, write_tiny

CONFIG = QuantizationConfig(scheme="int4_blockwise", group_size=64)


def random_words(seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join("".join(chr(c) for c in rng.integers(97, 123, 5)) for _ in range(2000))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("quantize") / "source", num_hidden_layers=4)
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "text.txt"
    path.write_text(random_words(seed=0))
    return path


def options(text: Path | None, **changes: object) -> QuantizeOptions:
    defaults = {"dataset": str(text), "num_samples": 20, "seq_len": 48, "backend": "cpu", "dtype": "float32"}
    return QuantizeOptions(**{**defaults, **changes})


def weight_bytes(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def run(
    source: Path, output: Path, chosen: QuantizeOptions, config: QuantizationConfig = CONFIG, **how: object
) -> Path:
    quantize(plan_conversion(str(source), config), chosen, output, Run(**how))
    return output


@pytest.fixture(scope="module")
def clean(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(source, tmp_path_factory.mktemp("quantize") / "clean", options(text), num_threads=1)


def test_threads_and_a_second_run_change_no_byte(source: Path, text: Path, clean: Path, tmp_path: Path) -> None:
    again = run(source, tmp_path / "again", options(text), num_threads=2)
    assert weight_bytes(again) == weight_bytes(clean)
    other = run(source, tmp_path / "other", options(text, seed=1))
    assert weight_bytes(other) != weight_bytes(clean)


def test_threads_change_no_byte_in_bfloat16_and_mixed(source: Path, text: Path, tmp_path: Path) -> None:
    chosen = options(text, dtype="bfloat16", target=Target(bits=5.0))
    written = []
    for threads in (1, 2):
        output = tmp_path / str(threads)
        mixed = plan_mixed(plan_conversion(str(source), CONFIG), chosen, output, Run(num_threads=threads))
        quantize(mixed.plan, chosen, output, Run(num_threads=threads))
        written.append((weight_bytes(output), (tmp_path / f"{threads}.sensitivity.json").read_bytes()))
    assert written[0] == written[1]


class Killed(BaseException):
    pass


def kill_after(last: int):
    def tell(block: QuantizedBlock) -> None:
        if block.index == last:
            raise Killed

    return tell


def test_a_killed_run_is_resumed_to_the_same_bytes(source: Path, text: Path, clean: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(Killed):
        run(source, output, options(text), tell=kill_after(2))
    assert not output.exists()
    journal = tmp_path / ".out.llmq-quantize"
    assert len(list(journal.glob("block-*"))) == 3
    (journal / ".partial").write_bytes(b"cut short")
    told = []
    run(source, output, options(text), resume=True, tell=told.append)
    assert [bool(block.errors) for block in told] == [True] * 4
    assert weight_bytes(output) == weight_bytes(clean)
    assert read_record(output).calibration == read_record(clean).calibration
    assert not journal.exists()


@pytest.mark.parametrize(
    ("changes", "config", "field"),
    [
        ({"seed": 7}, CONFIG, "seed"),
        ({"algorithm": "awq"}, CONFIG, "algorithm"),
        ({}, CONFIG.model_copy(update={"symmetric": True}), "schemes"),
    ],
)
def test_changed_settings_do_not_resume(
    source: Path, text: Path, tmp_path: Path, changes: dict, config: QuantizationConfig, field: str
) -> None:
    with pytest.raises(Killed):
        run(source, tmp_path / "out", options(text), tell=kill_after(0))
    with pytest.raises(ConfigError, match=rf"^resume: the interrupted run had {field}=.*leave out --resume"):
        run(source, tmp_path / "out", options(text, **changes), config, resume=True)


def test_a_second_run_to_the_same_output_is_refused(source: Path, text: Path, clean: Path, tmp_path: Path) -> None:
    refused = []

    def tell(block: QuantizedBlock) -> None:
        with pytest.raises(OutputError, match="another llmq is writing there") as raised:
            run(source, tmp_path / "out", options(text, seed=block.index), resume=block.index % 2 == 1)
        refused.append(raised)

    run(source, tmp_path / "out", options(text), tell=tell)
    assert len(refused) == 4
    assert weight_bytes(tmp_path / "out") == weight_bytes(clean)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_rounding_is_what_convert_does(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "rtn", options(None, algorithm="rtn", dataset=None))
    convert(plan_conversion(str(source), CONFIG), tmp_path / "convert")
    assert weight_bytes(tmp_path / "rtn") == weight_bytes(tmp_path / "convert")


def test_calibration_loses_less_of_the_predictions(
    source: Path, text: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_weights(str(source))
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    tokens = calibration_sequences(tokenizer, random_words(seed=1), 20, 48, 0)
    calibrator = load_backend("gpu").open_calibrator(
        weights, ModelOptions(device="cpu", dtype="float32", max_len=48), 1
    )

    def stream(model: ModelWeights) -> Stream:
        found = calibrator.start(tokens)
        for layer in range(4):
            for stage in range(len(STAGES) + 1):
                found = calibrator.advance(found, read_block(model, layer), stage)
        return found

    baseline = stream(weights)

    def lost(artifact: Path) -> float:
        return calibrator.divergence(baseline, stream(load_weights(str(artifact))))

    rounded = lost(run(source, tmp_path / "rtn", options(None, algorithm="rtn", dataset=None)))
    calibrated = lost(clean)
    assert calibrated < 0.3 * rounded
    assert lost(run(source, tmp_path / "both", options(text, algorithm="awq+gptq"))) < 1.3 * calibrated
    monkeypatch.setattr(blocks, "CORRECTION", 0.0)
    assert calibrated < 0.9 * lost(run(source, tmp_path / "uncorrected", options(text)))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "hqq"])
@pytest.mark.parametrize("scheme", ["int8_per_channel", "int4_per_channel", "int4_blockwise", "int8_blockwise"])
def test_every_algorithm_makes_artifacts_of_every_scheme(
    source: Path, text: Path, tmp_path: Path, algorithm: str, scheme: str
) -> None:
    config = QuantizationConfig(scheme=scheme)
    chosen = options(text, algorithm=algorithm, num_samples=2, seq_len=16)
    weights = load_weights(str(run(source, tmp_path / "out", chosen, config)))
    assert all(isinstance(weights[name], QTensor) for name in weights if name.endswith("_proj.weight"))
    assert read_record(tmp_path / "out").calibration.algorithm == algorithm


def test_ignored_linears_stay_and_overrides_hold(source: Path, text: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={
            "ignore": ("*.layers.1.*",),
            "overrides": (Override(pattern="re:.*down_proj", scheme="int8_per_channel"),),
        }
    )
    before, after = load_weights(str(source)), load_weights(str(run(source, tmp_path / "out", options(text), config)))
    for name in before:
        if ".layers.1." in name:
            assert (after[name] == before[name]).all()
        elif "down_proj" in name:
            assert after[name].num_bits == 8


@pytest.fixture(scope="module")
def table(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What schemes cost, measured once."""
    path = tmp_path_factory.mktemp("quantize") / "table.json"
    plan_mixed(plan_conversion(str(source), CONFIG), options(text, sensitivity=path), path.with_name("out"))
    return path


@pytest.mark.parametrize("target", [Target(bits=5.5), Target(size=700_000), Target(max_kl=0.002)])
def test_a_target_is_met_and_stages_are_alike(
    source: Path, text: Path, table: Path, tmp_path: Path, target: Target
) -> None:
    chosen = options(text, target=target, sensitivity=table)
    mixed = plan_mixed(plan_conversion(str(source), CONFIG), chosen, tmp_path / "out")
    linears = [row for row in mixed.plan.coverage if row.kind is Kind.LINEAR]
    if target.bits:
        bits = 8 * sum(row.stored_bytes for row in linears) / sum(row.shape[0] * row.shape[1] for row in linears)
        assert 0.99 * target.bits < bits <= target.bits
    if target.max_kl:
        assert mixed.kl <= target.max_kl
    schemes = {row.name.removesuffix(".weight"): row.scheme for row in linears}
    assert len({str(scheme) for scheme in schemes.values()}) > 1
    for layer in range(4):
        for stage in STAGES:
            assert len({schemes[f"model.layers.{layer}.{linear}"] for linear in stage}) == 1
    assert table.with_suffix(".html").read_text().count("<li>") == 16
    if target.size:
        quantize(mixed.plan, chosen, tmp_path / "out", sensitivity=mixed.sensitivity)
        size = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
        assert 0.99 * target.size < size <= target.size
        assert read_record(tmp_path / "out").calibration.sensitivity == mixed.sensitivity
        assert list(mixed.sensitivity)[:2] == [
            "model.layers.0.self_attn.{q_proj,k_proj,v_proj}",
            "model.layers.0.self_attn.o_proj",
        ]


@pytest.mark.slow
def test_a_mix_diverges_less_than_one_scheme_of_as_many_bits(text: Path, tmp_path: Path) -> None:
    """On a model in which some linears matter more than others."""
    config = tiny_config(num_hidden_layers=3)
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"] *= np.float32(8.0).astype(ml_dtypes.bfloat16)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    for name, contents in byte_tokenizer_files().items():
        (source / name).write_bytes(contents)
    chosen = options(text, target=Target(bits=4.5))
    plan = plan_conversion(str(source), CONFIG)
    mixed = plan_mixed(plan, chosen, tmp_path / "mixed")

    def num_bytes(plan: ConversionPlan) -> int:
        return sum(row.stored_bytes for row in plan.coverage if row.kind is Kind.LINEAR)

    assert 0.99 * num_bytes(plan) < num_bytes(mixed.plan) <= num_bytes(plan)
    found = {}
    for name, each in (("uniform", plan), ("mixed", mixed.plan)):
        quantize(each, chosen, tmp_path / name)
        found[name] = measure_artifact(plan, chosen, tmp_path / name)
    assert found["mixed"] < 0.95 * found["uniform"], found
    assert 0.5 * found["mixed"] < mixed.kl < 2 * found["mixed"]


def test_a_divergence_out_of_reach_is_refused(source: Path, text: Path, table: Path, tmp_path: Path) -> None:
    impossible = options(text, target=Target(max_kl=1e-9), sensitivity=table)
    with pytest.raises(ConfigError, match=r"^max_kl=1e-09: cannot be met, only the unquantized"):
        quantize_to_divergence(plan_conversion(str(source), CONFIG), impossible, tmp_path / "never")
    assert list(tmp_path.iterdir()) == []


def made(rounds: list[Round], bound: float, divergence: Callable[[float], float]) -> list[Round]:
    while (planned := next_planned(rounds, bound)) is not None:
        rounds.append(Round(planned, divergence(planned), round(1e6 / planned)))
    return rounds


@pytest.mark.parametrize("factor", [0.1, 0.4, 0.92, 1.5, 20])
@pytest.mark.parametrize("power", [0.8, 1.0, 1.2])
def test_a_bound_is_approached_from_either_side(factor: float, power: float) -> None:
    """The measured divergence is off the planned one by a factor, and grows a little slower or faster."""
    rounds = made([], 0.01, lambda planned: factor * 0.01 * (planned / 0.01) ** power)
    assert 0.009 <= rounds[-1].kl <= 0.01
    assert best_round(rounds, 0.01) is rounds[-1]


def test_a_bound_that_is_out_of_reach_ends_the_search() -> None:
    rounds = made([], 0.01, lambda _: 0.02)
    assert len(rounds) == 4
    assert best_round(rounds, 0.01) is None
    steps = made([], 0.01, lambda planned: 0.02 if planned > 0.005 else 0.001)
    assert best_round(steps, 0.01) == min((r for r in steps if r.kl == 0.001), key=lambda r: r.num_bytes)


@pytest.mark.slow
def test_a_divergence_is_met_by_the_artifact_itself_killed_or_not(
    source: Path, text: Path, table: Path, tmp_path: Path
) -> None:
    chosen = options(text, target=Target(max_kl=0.002), sensitivity=table)
    plan = plan_conversion(str(source), CONFIG)
    told: list[int] = []
    how = Run(tell=lambda block: told.append(block.index))
    _, kl = quantize_to_divergence(plan, chosen, tmp_path / "clean", how)
    assert 0.001 < kl <= 0.002
    assert len(told) > 4, "this bound takes more than one artifact"

    def kill(block: QuantizedBlock) -> None:
        told.append(block.index)
        if len(told) == 6:  # in the second block of the second artifact
            raise Killed

    told.clear()
    with pytest.raises(Killed):
        quantize_to_divergence(plan, chosen, tmp_path / "out", Run(tell=kill))
    assert not (tmp_path / "out").exists()
    changed = chosen.model_copy(update={"target": Target(max_kl=0.003)})
    with pytest.raises(ConfigError, match=r"^resume: the interrupted run had target=.*leave out --resume"):
        quantize_to_divergence(plan, changed, tmp_path / "out", Run(resume=True))

    def reentered(block: QuantizedBlock) -> None:
        if block.index:
            return
        with pytest.raises(OutputError, match="another llmq is writing there"):
            quantize_to_divergence(plan, chosen, tmp_path / "out")

    resumed = quantize_to_divergence(plan, chosen, tmp_path / "out", Run(resume=True, tell=reentered))
    assert resumed[1] == kl
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "clean")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean", "out"]


def test_the_table_is_measured_once(source: Path, text: Path, tmp_path: Path) -> None:
    told: list[str] = []
    chosen = options(text, target=Target(bits=5), num_samples=4)
    how = Run(progress=lambda what, _done, _total: told.append(what))
    first = plan_mixed(plan_conversion(str(source), CONFIG), chosen, tmp_path / "out", how)
    assert told
    told.clear()
    again = plan_mixed(plan_conversion(str(source), CONFIG), chosen, tmp_path / "out", how)
    assert not told
    assert again.plan.coverage == first.plan.coverage
    plan_mixed(plan_conversion(str(source), CONFIG), chosen.model_copy(update={"seed": 3}), tmp_path / "out", how)
    assert told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 1000}, r"^dataset=.*text.txt: has [\d,]+ tokens, 1000 samples of 48 take 47,000; lower"),
        ({"seq_len": 513}, r"^seq_len=513: must be at most the model's context, 512\.$"),
        ({"backend": "reference"}, "does not calibrate"),
        ({"dataset": "nowhere.txt"}, r"nowhere\.txt"),
    ],
)
def test_data_that_does_not_do_is_refused_early(
    source: Path, text: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(Exception, match=message) as raised:
        run(source, tmp_path / "out", options(text, **changes))
    assert type(raised.value).__module__ == "llmq.errors"
    assert list(tmp_path.iterdir()) == []


def test_options_that_contradict_each_other_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataset: is missing; gptq calibrates on text"):
        QuantizeOptions(algorithm="gptq")
    with pytest.raises(ValueError, match="dataset: is missing; what a scheme costs"):
        QuantizeOptions(algorithm="rtn", target=Target(bits=4.5))
    with pytest.raises(ValueError, match="one of --target-bits"):
        Target(bits=4, size=100)
    with pytest.raises(ConfigError, match="target_size='90 apples'"):
        Target.parse(None, "90 apples", None)
    assert [Target.parse(None, size, None).size for size in ("90MB", "1.5 GiB", "7")] == [90_000_000, 1610612736, 7]
    symmetric = CONFIG.model_copy(update={"symmetric": True})
    with pytest.raises(ConfigError, match="algorithm=hqq: moves the zero of a grid"):
        run(source, tmp_path / "out", QuantizeOptions(algorithm="hqq"), symmetric)
    (tmp_path / "there").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        run(source, tmp_path / "there", QuantizeOptions(algorithm="rtn"))


@pytest.mark.parametrize("target", [Target(bits=1.0), Target(size=1000)])
def test_a_target_out_of_reach_is_refused(source: Path, text: Path, tmp_path: Path, target: Target) -> None:
    with pytest.raises(ConfigError, match="cannot be met, even the coarsest choices take more"):
        plan_mixed(plan_conversion(str(source), CONFIG), options(text, target=target, num_samples=2), tmp_path / "o")


def peak_bytes(source: Path, text: Path, output: Path) -> int:
    """Peak memory of a process that quantizes, whose allocator gives back every array of a MB or more."""
    code = f"""if True:
        from pathlib import Path
        from llmq.config import QuantizationConfig
        from llmq.convert import plan_conversion
        from llmq.quantize.options import QuantizeOptions
        from llmq.quantize.run import quantize
        config = QuantizationConfig(scheme="int4_blockwise", group_size=64)
        options = QuantizeOptions(dataset={str(text)!r}, num_samples=2, seq_len=64, backend="cpu")
        quantize(plan_conversion({str(source)!r}, config), options, Path({str(output)!r}))
        status = Path("/proc/self/status").read_text()  # the peak that getrusage tells may be the parent's
        print(1024 * int(status.partition("VmHWM:")[2].split()[0]))
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
def test_memory_grows_with_the_block_and_not_with_the_layers(text: Path, tmp_path: Path) -> None:
    peaks = {}
    for num_layers, width in ((4, 512), (12, 512), (4, 768)):
        source = write_tiny(
            tmp_path / f"{num_layers}x{width}",
            num_hidden_layers=num_layers,
            hidden_size=width,
            intermediate_size=2 * width,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        for name, contents in byte_tokenizer_files().items():
            (source / name).write_bytes(contents)
        peaks[num_layers, width] = peak_bytes(source, text, tmp_path / f"out-{num_layers}x{width}")
    block = 10 * 512 * 512 * 2
    assert peaks[12, 512] - peaks[4, 512] < block  # what was added is 8 blocks, and 16 in float32
    assert peaks[4, 768] - peaks[4, 512] > 4 * block


@pytest.mark.parametrize("algorithm", ["mse", "gptq", "awq"])
def test_damaged_weights_are_refused_by_name(text: Path, tmp_path: Path, algorithm: str) -> None:
    config = tiny_config(num_hidden_layers=2)
    tensors = random_tensors(config)
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name][3, 4] = np.nan
    source = write_checkpoint(tmp_path / "source", config, tensors)
    for file, contents in byte_tokenizer_files().items():
        (source / file).write_bytes(contents)
    with pytest.raises(CheckpointError, match=rf"^{name}: holds NaN, infinity"):
        run(source, tmp_path / "out", options(text, algorithm=algorithm, num_samples=2))
    assert not (tmp_path / "out").exists()
