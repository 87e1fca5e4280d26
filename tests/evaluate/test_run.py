"""Whole runs: complete results, the same for the same input, also after an interruption."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from llmq.backends.base import Memory
from llmq.backends.registry import load_backend
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import ConfigError, OutputError
from llmq.evaluate import kv_cache
from llmq.evaluate.journal import Journal
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.packs import MAX_TOKENS_PER_CALL, MIN_TOKENS_PER_CALL
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


TEXT = "Tea is a drink that people make with water and leaves, and some drink it with milk. " * 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("stride", [None, 20])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_windows_are_resumed(
    model: str, data: Path, text: Path, tmp_path: Path, stride: int | None, share: float
) -> None:
    """Interrupted in perplexity, in divergence, or in what the cache costs; the first windows build on each other."""
    other = str(write_tiny_model(tmp_path / "other", seed=1))
    wanted = options(data, tasks=(), perplexity=text, window=64, stride=stride, reference=other, kv_cache_dtype="int8")
    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    steps: list[tuple[str, int]] = []
    evaluate(model, wanted, output=whole, progress=lambda what, done, _: steps.append((what, done)))
    num_steps = max(2, int(share * len(steps)))
    calls = iter(range(10_000))

    def interrupt(*_: Any) -> None:
        if next(calls) == num_steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, wanted, output=resumed, progress=interrupt)
    again: list[tuple[str, int]] = []
    evaluate(model, wanted, output=resumed, resume=True, progress=lambda what, done, _: again.append((what, done)))
    assert resumed.read_bytes() == whole.read_bytes()
    assert len(again) < len(steps) or num_steps < 4  # the first windows build on each other
    assert set(again) <= set(steps)


def test_what_a_quantized_cache_costs(
    model: str, data: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = options(data, tasks=(), perplexity=text, window=64, reference=model)
    assert "kv_cache/kl_mean" not in evaluate(model, wanted).metrics
    told: list[str] = []
    wanted = wanted.model_copy(update={"kv_cache_dtype": "int8"})
    same = evaluate(model, wanted, tell=told.append).metrics
    assert 0 < same["divergence/kl_mean"].value < kv_cache.MAX_KL
    assert "kv_cache/kl_mean" not in same  # the reference is the same model with an unquantized cache
    assert not any("KV cache" in line for line in told)
    artifact = tmp_path / "int4"
    convert(plan_conversion(model, QuantizationConfig(scheme="int4_per_channel")), artifact)
    both = evaluate(str(artifact), wanted, tell=told.append).metrics
    assert 0 < both["kv_cache/kl_mean"].value < both["divergence/kl_mean"].value
    assert not any("KV cache" in line for line in told)
    monkeypatch.setattr(kv_cache, "MAX_KL", both["kv_cache/kl_mean"].value / 2)
    evaluate(str(artifact), wanted, tell=told.append)
    assert sum(line.startswith("warning: the int8 KV cache changes this model's predictions") for line in told) == 1


def test_a_reference_file_says_what_made_it(model: str, data: Path, text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "reference.safetensors"
    wanted = options(data, tasks=(), perplexity=text, window=64, reference=model, reference_cache=cache)
    evaluate(model, wanted)
    for changes, told in (
        ({"dtype": "bfloat16"}, "dtype=float32, now it is bfloat16"),
        ({"backend": "tpu"}, "backend=gpu, now it is tpu"),
        ({"reference": str(write_tiny_model(tmp_path / "other", seed=1))}, "another model"),
    ):
        with pytest.raises(ConfigError) as caught:
            evaluate(model, wanted.model_copy(update=changes))
        assert str(caught.value) == f"{cache}: holds the predictions for {told}; remove it, and it is made anew."


def test_calls_go_by_the_memory_of_the_device(model: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = options(data, tasks=("arc_easy",), limit=1)
    for total, tokens in ((1 << 20, MIN_TOKENS_PER_CALL), (1 << 40, MAX_TOKENS_PER_CALL)):
        asked: list[str | None] = []
        memory = Memory(total, 0)
        monkeypatch.setattr(
            type(load_backend("gpu")), "memory", lambda _, device, m=memory, a=asked: (a.append(device), m)[1]
        )
        assert evaluate(model, wanted).config["tokens_per_call"] == tokens
        assert asked == ["cpu"]


def test_examples_from_the_evaluated_split_are_told(model: str, data: Path) -> None:
    told: list[str] = []
    evaluate(model, options(data, limit=1), tell=told.append)
    assert not any("few-shot" in line for line in told)
    evaluate(model, options(data, tasks=("arc_easy",), limit=1, num_fewshot=1), tell=told.append)
    assert any(
        line == "few-shot examples of arc_easy are other items of the evaluated split: --data-dir has no training data"
        for line in told
    )


def test_texts_are_generated_on_several_slots(model: str, data: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "tea.yaml").write_text(
        f"task: tea\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data / 'arc_easy_test.jsonl'}}}}}\n"
        "output_type: generate_until\ntest_split: test\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{id}}'\n"
        'generation_kwargs: {max_gen_toks: 9, until: ["\'"]}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    wanted = options(data, tasks=("tea",), include_path=own, log_samples=True)
    samples = [evaluate(model, wanted.model_copy(update={"batch_size": size})).samples["tea"] for size in (None, 1, 3)]
    assert samples[0] == samples[1] == samples[2]
    assert len({sample["resps"][0][0] for sample in samples[0]}) > 1


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
