"""``llmq report`` in processes of its own."""

from pathlib import Path

import pytest

from llmq.evaluate.results import EvaluatedModel, Metric, Results
from tests.commands.test_cli import llmq, refused


def write_run(path: Path, value: float, limit: int = 100) -> Path:
    results = Results(
        model=EvaluatedModel(
            name=f"models/{path.stem}", format="gguf", weights_sha256=None, num_bytes=1_000_000, quantization=None
        ),
        backend={"name": "gpu", "dtype": "bfloat16"},
        config={"limit": limit},
        versions={},
        metrics={"truthfulqa_mc2/acc": Metric(value=value, stderr=0.0165, higher_is_better=True)},
    )
    path.write_text(results.model_dump_json())
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    scores = {"bf16": 0.4806, "int8": 0.4914, "int4": 0.4872}
    return [write_run(tmp_path / f"{name}.json", value) for name, value in scores.items()]


def test_markdown_goes_to_standard_output(runs: list[Path], tmp_path: Path) -> None:
    log = tmp_path / "trained" / "qat_metrics.jsonl"
    log.parent.mkdir()
    log.write_text('{"step": 0, "eval_loss": 3.5, "eval_loss_quantized": 4.0}\n')
    done = llmq("report", log.parent, *runs, "--baseline", "int8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# What quantization cost\n")
    assert done.stdout.count("inside the noise") == 2 + 2
    assert "## Difference to int8" in done.stdout
    assert "| trained | 0 |" in done.stdout


@pytest.mark.parametrize(("name", "start"), [("report.md", "# What"), ("report.html", "<!DOCTYPE html>")])
def test_a_report_in_a_file(runs: list[Path], tmp_path: Path, name: str, start: str) -> None:
    out = tmp_path / name
    done = llmq("report", *runs, "-o", out)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"report of 3 runs in {out}\n"
    assert out.read_text().startswith(start)
    assert refused("report", *runs, "-o", out) == (
        f"output={out}: exists already; choose another file or add --force to replace it."
    )
    out.write_text("old")
    assert llmq("report", *runs, "-o", out, "--force").returncode == 0
    assert out.read_text().startswith(start)
    assert len(list(tmp_path.iterdir())) == 4


def test_errors_are_one_sentence(runs: list[Path], tmp_path: Path) -> None:
    damaged, fewer, missing = (
        tmp_path / "damaged.json",
        write_run(tmp_path / "fewer.json", 0.4, 50),
        tmp_path / "no.json",
    )
    damaged.write_text("{")
    assert refused("report", missing) == f"{missing}: cannot be read (No such file or directory)."
    assert refused("report", tmp_path).startswith(f"{tmp_path / 'qat_metrics.jsonl'}: cannot be read (")
    assert refused("report", damaged).startswith(f"{damaged}: is not a result of llmq eval (")
    assert f"{fewer}: was run with limit=50, {runs[0]} with 100; runs" in refused("report", runs[0], fewer)
    assert refused("report", runs[0], "-o", "report.pdf") == "output=report.pdf: must end in .md or .html."
    nowhere = tmp_path / "nowhere" / "report.md"
    assert refused("report", runs[0], "-o", nowhere) == (
        f"output={nowhere}: cannot be written (No such file or directory)."
    )
    assert refused("report", *runs, "--baseline", "fp8").startswith("baseline='fp8': fits no run; name one of 1 (bf16)")
    assert refused("report", *runs, "--qat", "2") == "ptq and qat: belong together; name both runs, or none."
