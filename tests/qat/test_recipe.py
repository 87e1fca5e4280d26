import json
from pathlib import Path

import pytest
import yaml

from llmq.errors import ConfigError
from llmq.qat.recipe import Recipe, read_recipe, write_recipe
from tests.conftest import ROOT


def recipe(**changes: object) -> Recipe:
    return read_recipe(None, model="m", data="d", **changes)


def test_schedules_begin_at_the_peak_and_end_at_nothing() -> None:
    for schedule, last in (("linear", 0.1), ("cosine", 0.024471741852423), ("constant", 1.0)):
        found = recipe(schedule=schedule, lr=1.0)
        rates = [found.learning_rate(step, 10) for step in range(10)]
        assert rates[0] == 1.0
        assert rates[-1] == pytest.approx(last)
        assert rates == sorted(rates, reverse=True)


def test_warmup_rises_in_equal_steps() -> None:
    found = recipe(schedule="constant", lr=2.0, warmup=4)
    assert [found.learning_rate(step, 10) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_the_delay_is_a_function_of_the_step() -> None:
    found = recipe(fake_quant_after_n_steps=2)
    assert [found.is_quantized(step) for step in range(4)] == [False, False, True, True]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = recipe(lora={"rank": 4}, quantization={"scheme": "int4_blockwise", "group_size": 64}, clip=None)
    path = tmp_path / "recipe.yaml"
    path.write_text(write_recipe(found))
    assert read_recipe(path) == found
    assert read_recipe(path, lr=1.0, quantization={"symmetric": True}).quantization.group_size == 64


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "must hold the fields of a recipe"),
        ("model: m\ndata: d\nlearning_rate: 1", "learning_rate=1: extra inputs are not permitted"),
        ("model: m\ndata: d\nlr: .nan", "lr=nan: input should be a finite number"),
        ("model: m\ndata: d\nmax_steps: 3\nwarmup: 3", "warmup=3: must be less than the 3 steps"),
        ("data: d", "model: is missing"),
    ],
)
def test_a_bad_recipe_is_refused_in_a_sentence(tmp_path: Path, contents: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(contents)
    with pytest.raises(ConfigError, match=message):
        read_recipe(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "missing.yaml")


def test_the_examples_are_recipes() -> None:
    paths = sorted((ROOT / "examples" / "qat").glob("*.yaml"))
    assert len(paths) == 2
    for path in paths:
        found = read_recipe(path)
        assert set(yaml.safe_load(path.read_text())) <= set(Recipe.model_fields)
        assert json.loads(found.model_dump_json())
