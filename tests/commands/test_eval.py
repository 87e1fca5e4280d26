"""``llmq eval`` in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.test_cli import HEAVY, llmq, refused
from tests.evaluate.local_data import write_local_data, write_tiny_model

pytest.importorskip("lm_eval")

#: Runs the command line with every way to the network shut.
WITHOUT_NETWORK = """
import socket, sys
def blocked(*args):
    raise AssertionError("the network was reached for")
socket.socket.connect = socket.getaddrinfo = blocked
from llmq.cli import main
sys.argv = ["llmq", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_local_data(tmp_path_factory.mktemp("eval") / "data")


def test_help_imports_nothing_heavy() -> None:
    heavy = (*HEAVY, "lm_eval", "datasets")
    code = (
        "import sys\nfrom llmq.cli import app\ntry: app(['eval', '--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "--data-dir" in done.stdout


def test_a_run_without_network(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    args = ["eval", model, "--tasks", "hellaswag,truthfulqa_mc2", "--data-dir", data, "--limit", 3]
    args += ["--max-model-len", 200, "--backend", "cpu", "--dtype", "float32", "-o", output, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(output.read_text())
    # A slow machine adds lines of progress.
    lines = [line for line in done.stderr.splitlines() if " requests" not in line]
    assert lines[0].startswith("backend gpu on CPU")
    assert lines[1].split() == ["metric", "value", "error", "better", "items"]
    assert [line.split()[0] for line in lines[2:5]] == ["hellaswag/acc", "hellaswag/acc_norm", "truthfulqa_mc2/acc"]
    assert lines[5].startswith("9 of 21 prompts were longer than the context, 200 tokens")
    assert lines[6:] == [f"results in {output}"]


def test_tasks_are_listed(data: Path) -> None:
    done = llmq("eval", "--tasks", "list", "--data-dir", data)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "hellaswag" in done.stdout.split()


class TestRefused:
    def test_nothing_to_measure(self, model: Path) -> None:
        assert refused("eval", model).startswith("tasks: are missing; name some with --tasks, or a text")

    def test_no_model(self) -> None:
        assert refused("eval", "--tasks", "hellaswag").startswith("model: is missing")

    @pytest.mark.parametrize("limit", [0, -1])
    def test_limit(self, model: Path, limit: int) -> None:
        message = refused("eval", model, "--tasks", "hellaswag", "--limit", limit)
        assert message == f"limit={limit}: input should be greater than or equal to 1."

    @pytest.mark.parametrize(
        ("option", "value", "field"),
        [
            ("--batch-size", "many", "batch_size"),
            ("--batch-size", 0, "batch_size"),
            ("--num-fewshot", -1, "num_fewshot"),
            ("--seed", -1, "seed"),
            ("--dtype", "float8", "dtype"),
            ("--kv-cache-dtype", "int4", "kv_cache_dtype"),
            ("--max-model-len", 0, "max_model_len"),
            ("--data-dir", "missing", "data_dir"),
        ],
    )
    def test_values(self, model: Path, option: str, value: object, field: str) -> None:
        assert refused("eval", model, "--tasks", "hellaswag", option, value).startswith(f"{field}=")

    def test_a_reference_without_a_text(self, model: Path) -> None:
        assert "name one with --perplexity" in refused("eval", model, "--tasks", "hellaswag", "--reference", model)

    def test_a_missing_data_file(self, model: Path, data: Path) -> None:
        message = refused("eval", model, "--tasks", "hellaswag,piqa", "--data-dir", data)
        assert message.endswith("piqa_validation.jsonl: is missing; task piqa reads it when --data-dir is given.")

    def test_an_unknown_task(self, model: Path, data: Path) -> None:
        message = refused("eval", model, "--tasks", "helaswag", "--data-dir", data)
        assert message == "tasks='helaswag': there is no such task; did you mean hellaswag?"

    def test_without_lm_eval(self, model: Path) -> None:
        code = (
            "import importlib.util, sys\nreal = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda name, *rest: None if name == 'lm_eval' else real(name, *rest)\n"
            f"sys.argv = ['llmq', 'eval', {str(model)!r}, '--tasks', 'hellaswag']\nfrom llmq.cli import main\nmain()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == "llmq: tasks: need lm-eval, which is not installed; pip install 'llmq[eval]'.\n"
