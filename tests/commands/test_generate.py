"""``llmq generate`` on a tiny artifact, on every backend."""

from pathlib import Path

import pytest

from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from tests.commands.test_cli import llmq, refused
from tests.tiny import byte_tokenizer_files, write_tiny


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("generate")
    source = write_tiny(directory / "source")
    for name, contents in byte_tokenizer_files().items():
        (source / name).write_bytes(contents)
    convert(plan_conversion(str(source), QuantizationConfig(scheme="int4_blockwise")), directory / "artifact")
    return directory / "artifact"


def test_backends_say_the_same(artifact: Path) -> None:
    options = ("--max-tokens", 12, "--dtype", "float32")
    outputs = {}
    for backend in ("cpu", "gpu", "tpu", "reference"):
        device = () if backend == "cpu" else ("--device", "cpu")
        done = llmq("generate", artifact, "Hello", "--backend", backend, *device, *options)
        assert done.returncode == 0, done.stderr
        outputs[backend] = done.stdout
    assert len(set(outputs.values())) == 1, outputs
    assert len(outputs["reference"]) > 5


def test_sampling_is_reproducible_and_stats_are_on_stderr(artifact: Path) -> None:
    options = (
        "--temperature",
        1,
        "--top-k",
        50,
        "--top-p",
        0.9,
        "--seed",
        11,
        "--max-tokens",
        20,
        "--backend",
        "cpu",
        "--stats",
    )
    first, second = (llmq("generate", artifact, "Hello", *options) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert "int4 tinygemm" in first.stderr
    assert "generated 20 tokens" in first.stderr
    assert "seed 11" in first.stderr
    other = llmq("generate", artifact, "Hello", *options, "--seed", 12)
    assert other.stdout != first.stdout


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(artifact: Path) -> None:
    options = ("--max-tokens", 20, "--backend", "cpu", "--dtype", "float32", "--stats")
    whole = llmq("generate", artifact, "Hello", *options)
    assert whole.returncode == 0, whole.stderr
    text = whole.stdout.removesuffix("\n")
    stop = text[3:5]
    done = llmq("generate", artifact, "Hello", *options, "--stop", "not in it", "--stop", stop)
    assert done.stdout == text[: text.index(stop)] + "\n"
    assert "finished by stop" in done.stderr


def test_a_repetition_penalty_changes_what_repeats(artifact: Path) -> None:
    """So strong a penalty that no token comes twice while there are others of a positive logit."""
    options = ("--max-tokens", 12, "--backend", "cpu", "--dtype", "float32")
    plain = llmq("generate", artifact, "aaaa", *options)
    penalized = llmq("generate", artifact, "aaaa", *options, "--repetition-penalty", 100)
    assert plain.returncode == penalized.returncode == 0, penalized.stderr
    assert plain.stdout != penalized.stdout


def test_a_min_p_of_1_leaves_the_most_likely_token(artifact: Path) -> None:
    options = ("--max-tokens", 12, "--backend", "cpu", "--dtype", "float32")
    greedy = llmq("generate", artifact, "Hello", *options)
    narrow = llmq("generate", artifact, "Hello", *options, "--temperature", 2, "--min-p", 1)
    assert greedy.returncode == narrow.returncode == 0, narrow.stderr
    assert narrow.stdout == greedy.stdout


def test_the_cache_may_be_int8(artifact: Path) -> None:
    for backend in ("cpu", "tpu"):
        done = llmq(
            "generate",
            artifact,
            "Hello",
            "--backend",
            backend,
            "--max-tokens",
            4,
            "--kv-cache-dtype",
            "int8",
            "--stats",
        )
        assert done.returncode == 0, done.stderr
        assert "cache in int8" in done.stderr


def test_a_file_of_prompts_and_the_chat_template(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\r\n\r\ntwo\u2028lines\n".encode())
    done = llmq(
        "generate",
        artifact,
        "--prompts-file",
        tmp_path / "prompts.txt",
        "--chat",
        "--max-tokens",
        4,
        "--backend",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.split("\n") if line.startswith(">>> ")] == [">>> one", ">>> two\u2028lines"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("x", "--backend", "npu"), "backend='npu': must be one of auto, cpu, gpu, reference, tpu"),
        (("x", "--backend", "cpu", "--device", "cuda"), "device='cuda': contradicts --backend cpu"),
        (("x", "--backend", "gpu", "--device", "nowhere"), "device='nowhere'"),
        (("x", "--min-p", "2"), "min_p=2.0: input should be less than or equal to 1"),
        (("x", "--stop", ""), "stop"),
        (("x", "--temperature", "-1"), "temperature=-1.0: input should be greater than or equal to 0"),
        (
            ("x", "--max-model-len", "100000"),
            "max_model_len=100000: must be positive and at most the model's context, 512",
        ),
        (("x", "--max-model-len", "0"), "max_model_len=0: must be positive"),
        (("x", "--kv-cache-dtype", "int4"), "kv_cache_dtype='int4': must be auto or int8"),
        (("x", "--max-model-len", "8"), "exceed the context of 8"),
        (("x", "--prompts-file", "y"), "exclude each other"),
        (("--prompts-file", "./nowhere"), "prompts_file=nowhere: cannot be read"),
    ],
)
def test_refused(artifact: Path, args: tuple, message: str) -> None:
    assert message in refused("generate", artifact, *args)


def test_a_terminal_that_lacks_a_character_shows_another(artifact: Path) -> None:
    import os

    options = ("--max-tokens", 40, "--backend", "cpu", "--temperature", 5, "--seed", 1)
    plain = llmq("generate", artifact, "x", *options)
    ascii_only = llmq("generate", artifact, "x", *options, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert not plain.stdout.isascii()
    assert ascii_only.returncode == 0, ascii_only.stderr
    assert ascii_only.stdout.isascii()
