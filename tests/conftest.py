"""Fixtures that several test modules share."""

import os
from pathlib import Path

import pytest

from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

# What tests compile stays out of the user's own cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # as with the user's

#: Evaluation texts, beside the checkout where there is one.
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """A real model."""
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2.name} was not fetched: run `make model`")
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> ModelWeights:
    """The real model, unquantized."""
    return load_weights(str(smollm2_gguf))


@pytest.fixture(scope="session")
def smollm2_int4(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as an int4_blockwise artifact with every default."""
    path = tmp_path_factory.mktemp("smollm2") / "int4_blockwise"
    convert(plan_conversion(str(smollm2_gguf), QuantizationConfig(scheme="int4_blockwise")), path)
    return path


@pytest.fixture(scope="session")
def wikitext2() -> Path:
    """WikiText-2 raw test, one page a line."""
    path = DATA / "wikitext2_test_pages.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside the checkout")
    return path


@pytest.fixture(scope="session")
def evaluation_data() -> Path:
    """Local files of lm-eval's tasks."""
    if not (DATA / "hellaswag_validation.jsonl").is_file():
        pytest.skip("the evaluation data is not beside the checkout")
    return DATA
