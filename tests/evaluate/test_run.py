"""Whole runs: complete results, the same for the same input, also after an interruption."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import ConfigError, OutputError
from llmq.evaluate.journal import Journal
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.results import read_results
from llmq.evaluate.run import evaluate
from tests.evaluate.local_data import write_local_data, write_tiny_model

NAMES = ("hellaswag", "arc_easy", "wikitext")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("run") / "model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_local_data(tmp_path_factory.mktemp("run") / "data")


def options(data: Path, **changes: Any) -> EvalOptions:
    values: dict[str, Any] = {"tasks": NAMES, "data_dir": data, "backend": "gpu", "device": "cpu", "dtype": "float32"}
    return EvalOptions(**{**values, **changes})


class Interrupt:
    """Progress that stops after so many requests, as Ctrl-C does."""

    def __init__(self, after: int | None = None) -> None:
        self.after = after
        self.done: list[int] = []

    def __call__(self, _: str, done: int, total: int) -> None:
        self.done.append(done)
        self.total = total
        if self.after is not None and done >= self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_resumed_run_gives_the_same_file(model: str, data: Path, tmp_path: Path, batch_size: Any) -> None:
    wanted = options(data, batch_size=batch_size, log_samples=True)
    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    evaluate(model, wanted, output=whole)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, wanted, output=resumed, progress=Interrupt(after=25))
    assert not resumed.exists()
    journal = tmp_path / "resumed.json.journal"
    with journal.open("a") as file:
        file.write('{"torn":')
    progress, told = Interrupt(), []
    evaluate(model, wanted, output=resumed, resume=True, progress=progress, tell=told.append)
    assert progress.done[0] > 25
    assert any(line.startswith("resuming: ") for line in told)
    assert resumed.read_bytes() == whole.read_bytes()
    assert not journal.exists()


def test_the_same_input_gives_the_same_file(model: str, data: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        evaluate(model, options(data), output=file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_results_are_complete(model: str, data: Path, tmp_path: Path) -> None:
    results = evaluate(model, options(data, limit=2, num_fewshot=1, log_samples=True), output=tmp_path / "r.json")
    assert read_results(tmp_path / "r.json") == results
    assert results.model.weights_sha256
    assert results.config["limit"] == 2
    assert results.config["num_fewshot"] == dict.fromkeys(NAMES, 1)
    assert set(results.config["data_sha256"]) == set(NAMES)
    assert {"llmq", "lm-eval", "torch", "python", "task hellaswag"} <= set(results.versions)
    assert results.backend["dtype"] == "float32"
    assert results.counts["tasks/requests"] == 2 * 4 + 2 * 3 + 2
    assert results.counts["tasks/truncated_prompts"] == 0
    assert [sample["doc_id"] for sample in results.samples["hellaswag"]] == [0, 1]
    assert str(data) not in (tmp_path / "r.json").read_text()
    for name, items in results.items.items():
        assert len(items) == len(results.item_ids[name]) == 2


def test_samples_are_left_out_unless_asked_for(model: str, data: Path) -> None:
    assert evaluate(model, options(data, limit=1)).samples == {}


def test_long_prompts_are_cut_and_counted(model: str, data: Path) -> None:
    results = evaluate(model, options(data, tasks=("hellaswag",), max_model_len=40))
    assert results.counts["tasks/truncated_prompts"] == results.counts["tasks/requests"] == 32


def test_chat_templates_are_applied(model: str, data: Path) -> None:
    results = evaluate(model, options(data, tasks=("arc_easy",), limit=1, apply_chat_template=True, log_samples=True))
    (sample,) = results.samples["arc_easy"]
    prompt, continuation = sample["arguments"][0]
    assert prompt == "[user]Question: How much is 0 and one?\nAnswer:[assistant]"
    assert continuation == "0"


@pytest.mark.parametrize("backend", ["tpu", "reference"])
def test_backends_make_the_same_choices(model: str, data: Path, backend: str) -> None:
    expected = evaluate(model, options(data))
    dtype = None if backend == "reference" else "float32"
    found = evaluate(model, options(data, backend=backend, dtype=dtype))
    for name, items in expected.items.items():
        assert found.items[name] == pytest.approx(items, abs=1e-4)


def test_text_against_a_reference(model: str, data: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "int8"
    convert(plan_conversion(model, QuantizationConfig(scheme="int8_per_channel")), artifact)
    text = tmp_path / "text.txt"
    text.write_text("Tea is a drink that people make with water and leaves. " * 8)
    wanted = options(data, tasks=(), perplexity=text, window=64, reference=model)
    results = evaluate(str(artifact), wanted, output=tmp_path / "r.json")
    assert results.metrics["perplexity/token"].value > 1
    assert 0 < results.metrics["divergence/kl_mean"].value < 0.1
    assert results.model.format == "llmq artifact"
    assert results.model.coverage
    assert results.config["reference"] == model
    cache = tmp_path / "reference.safetensors"
    cached = [evaluate(str(artifact), wanted.model_copy(update={"reference_cache": cache})) for _ in range(2)]
    assert cached[0] == cached[1]
    name = "divergence/top1_agreement"
    assert cached[0].metrics[name].value == results.metrics[name].value


class TestRefused:
    def refused(self, error: type[Exception], *args: Any, **kwargs: Any) -> str:
        with pytest.raises(error) as caught:
            evaluate(*args, **kwargs)
        return str(caught.value)

    def test_a_journal_of_another_run(self, model: str, data: Path, tmp_path: Path) -> None:
        output = tmp_path / "r.json"
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, options(data), output=output, progress=Interrupt(after=3))
        message = self.refused(ConfigError, model, options(data, limit=3), output=output, resume=True)
        assert "is of a run with limit=None, now it is 3; leave out --resume to start anew" in message
        assert not output.exists()

    def test_another_model(self, model: str, data: Path, tmp_path: Path) -> None:
        output, other = tmp_path / "r.json", str(write_tiny_model(tmp_path / "other", seed=1))
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, options(data), output=output, progress=Interrupt(after=3))
        assert "is of a run with model=" in self.refused(ConfigError, other, options(data), output=output, resume=True)

    def test_a_file_that_is_no_journal(self, tmp_path: Path) -> None:
        path = tmp_path / "j"
        for text in ("tea\n", "[]\n", '{"run": 3, \n'):
            path.write_text(text)
            with pytest.raises(ConfigError, match="is not a journal of llmq eval"):
                Journal(path, {}, resume=True)

    def test_resume_without_output(self, model: str, data: Path) -> None:
        assert "needs --output" in self.refused(ConfigError, model, options(data), resume=True)

    def test_an_output_that_is_something_else(self, model: str, data: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("precious")
        for output, reason in (
            (tmp_path / "notes.txt", "is not a result of llmq eval"),
            (tmp_path / "missing" / "r.json", "does not exist"),
            (tmp_path, "is a directory"),
        ):
            assert reason in self.refused(OutputError, model, options(data), output=output)
        assert (tmp_path / "notes.txt").read_text() == "precious"

    def test_a_context_the_model_lacks(self, model: str, data: Path) -> None:
        assert "at most the context" in self.refused(ConfigError, model, options(data, max_model_len=4096))

    def test_a_model_without_a_template(self, data: Path, tmp_path: Path) -> None:
        model = write_tiny_model(tmp_path / "model")
        settings = json.loads((model / "tokenizer_config.json").read_text())
        del settings["chat_template"]
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        assert "no chat template" in self.refused(ConfigError, str(model), options(data, apply_chat_template=True))
