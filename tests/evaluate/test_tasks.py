"""lm-eval's tasks: from local files, with the network out of reach, and in silence."""

import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from llmq.errors import ConfigError
from llmq.evaluate import tasks as tasks_module
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.tasks import LOCAL_TASKS, TaskResults, data_files, load_tasks, task_names
from tests.evaluate.local_data import ARC, write_local_data


class Lengths(LM):
    """A model that finds a continuation the likelier the shorter it is."""

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        self.asked = [request.args for request in requests]
        return [(-float(len(continuation)), len(continuation) < 4) for _, continuation in self.asked]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return [-float(len(request.args[0])) for request in requests]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [request.args[0][-3:] for request in requests]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_local_data(tmp_path / "data")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: Any) -> NoReturn:
        raise AssertionError("the network was reached for")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)


def run(lm: LM, **options: Any) -> TaskResults:
    with load_tasks(EvalOptions(**options)) as tasks:
        return tasks.run(lm)


def test_local_files_are_evaluated_in_silence(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("hellaswag", "arc_easy", "truthfulqa_mc2", "wikitext")
    results = run(Lengths(), tasks=names, data_dir=data)
    assert capfd.readouterr() == ("", "")
    assert results.items["hellaswag/acc"] == [0.0, 1.0, 0.0, 0.0] * 2
    assert results.metrics["hellaswag/acc"].value == 0.25
    assert results.metrics["arc_easy/acc"].stderr is not None
    assert [results.versions[f"task {name}"] for name in names] == ["1.0", "1.0", "3.0", "2.0"]
    assert set(results.samples) == set(names)


def test_metrics_that_are_no_plain_mean_have_items_too(data: Path) -> None:
    results = run(Lengths(), tasks=("wikitext",), data_dir=data)
    metric, items = results.metrics["wikitext/word_perplexity"], results.items["wikitext/word_perplexity"]
    assert metric.link == "exp"
    assert not metric.higher_is_better
    assert metric.stderr is not None
    import math

    from lm_eval.api.metrics import weighted_perplexity

    values = [sample["word_perplexity"] for sample in results.samples["wikitext"]]
    assert metric.value == pytest.approx(weighted_perplexity(values))
    assert math.exp(sum(items) / len(items)) == pytest.approx(metric.value)


def test_items_are_named_by_place_and_content(data: Path) -> None:
    results = run(Lengths(), tasks=("arc_easy",), data_dir=data, limit=3)
    names = results.item_ids["arc_easy/acc"]
    assert [name.split(":")[0] for name in names] == ["0", "1", "2"]
    assert len({name.split(":")[1] for name in names}) == 3


def test_an_item_is_never_its_own_example(data: Path) -> None:
    for name in ("arc_easy", "hellaswag"):
        lm = Lengths()
        run(lm, tasks=(name,), data_dir=data, num_fewshot=len(ARC) - 1)
        for prompt, _ in lm.asked:
            examples, question = prompt.split("\n\n")[:-1], prompt.split("\n\n")[-1]
            assert len(examples) == len(ARC) - 1
            assert not any(example.startswith(question) for example in examples)


def test_the_seed_chooses_the_examples(data: Path) -> None:
    def prompts(seed: int) -> list[Any]:
        lm = Lengths()
        run(lm, tasks=("arc_easy",), data_dir=data, num_fewshot=2, seed=seed)
        return lm.asked

    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


def test_a_task_that_has_its_examples_in_the_prompt_keeps_none(data: Path) -> None:
    results = run(Lengths(), tasks=("truthfulqa_mc2", "arc_easy"), data_dir=data, num_fewshot=2)
    assert results.num_fewshot == {"truthfulqa_mc2": 0, "arc_easy": 2}


def test_tasks_of_ones_own(data: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "tea.yaml").write_text(
        f"task: tea\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data / 'arc_easy_test.jsonl'}}}}}\n"
        "output_type: generate_until\ntest_split: test\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{id}}'\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    results = run(Lengths(), tasks=("tea", "hellaswag"), data_dir=data, include_path=own)
    assert results.metrics["tea/exact_match"].value == 0.0
    assert "hellaswag/acc" in results.metrics
    assert "tea" in task_names(data, own)


def test_the_table_is_that_of_lm_eval() -> None:
    """Every official definition is there, and evaluates the split that the local file holds."""
    import importlib.util

    from lm_eval.tasks._yaml_loader import load_yaml

    found = importlib.util.find_spec("lm_eval")
    root = Path(found.submodule_search_locations[0]) / "tasks"
    for name, row in LOCAL_TASKS.items():
        definition = load_yaml(root / row.definition, resolve_func=False)
        assert definition["task"] == name
        wanted = "test" if definition.get("test_split") else "validation"
        assert row.split == wanted


def test_hashes_name_the_data(data: Path) -> None:
    before = data_files(("hellaswag", "arc_easy"), data)
    assert set(before) == {"hellaswag", "arc_easy"}
    (data / "arc_easy_test.jsonl").write_text("{}")
    after = data_files(("hellaswag", "arc_easy"), data)
    assert after["hellaswag"] == before["hellaswag"]
    assert after["arc_easy"] != before["arc_easy"]
    assert data_files(("hellaswag",), None) == {}


class TestRefused:
    def refused(self, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught, load_tasks(EvalOptions(**options)):
            pass
        return str(caught.value)

    def test_a_missing_file(self, data: Path) -> None:
        message = self.refused(tasks=("piqa",), data_dir=data)
        assert message == f"{data}/piqa_validation.jsonl: is missing; task piqa reads it when --data-dir is given."

    def test_an_unknown_task(self, data: Path) -> None:
        assert self.refused(tasks=("helaswag",), data_dir=data).endswith("no such task; did you mean hellaswag?")

    def test_a_task_without_local_data(self, data: Path) -> None:
        assert "no local file is known for it, only for arc_challenge, arc_easy" in self.refused(
            tasks=("gsm8k",), data_dir=data
        )

    def test_a_damaged_file(self, data: Path) -> None:
        (data / "piqa_validation.jsonl").write_text("no JSON\n")
        assert "must hold one JSON object a line" in self.refused(tasks=("piqa",), data_dir=data)

    def test_without_lm_eval(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks_module.importlib.util, "find_spec", lambda _: None)
        assert "pip install 'llmq[eval]'" in self.refused(tasks=("hellaswag",))
