"""lm-eval as a client of the server gets what ``llmq eval`` gets from the model itself."""

from pathlib import Path

import pytest

from llmq.evaluate.options import EvalOptions
from llmq.evaluate.run import evaluate
from tests.conformance.api import COMPLETIONS
from tests.conformance.servers import REAL, running

pytest.importorskip("lm_eval")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of lm-eval's imports

#: Items of each task; 50 and 20 were compared once, see `measure`.
ITEMS = {"hellaswag": 5, "truthfulqa_mc2": 1}


def measure(model: Path, backend: str, task: str, limit: int, data_dir: Path) -> tuple[list[float], list[float]]:
    """Log-likelihoods of every choice, in process and over HTTP."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from llmq.evaluate.tasks import load_tasks

    options = EvalOptions(
        tasks=(task,), limit=limit, data_dir=data_dir, backend=backend, device="cpu", dtype="float32", log_samples=True
    )
    inside = evaluate(str(model), options)
    command = (*REAL, model, "--backend", backend, "--device", "cpu", "--dtype", "float32", "--max-num-seqs", 2)
    with running(*command, "--warmup", "lazy", "--served-model-name", "m") as server, load_tasks(options) as tasks:
        client = LocalCompletionsAPI(
            base_url=server.base_url + COMPLETIONS, model="m", tokenizer_backend="remote", batch_size=4
        )
        outside = tasks.run(client)
    return [_loglikelihoods(samples[task]) for samples in (inside.samples, outside.samples)]


def _loglikelihoods(samples: list) -> list[float]:
    return [float(response[0]) for sample in samples for response in sample["filtered_resps"]]


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize("task", ITEMS)
def test_every_choice(task: str, backend: str, smollm2_int4: Path, evaluation_data: Path) -> None:
    inside, outside = measure(smollm2_int4, backend, task, ITEMS[task], evaluation_data)
    assert len(inside) == len(outside) >= 4
    assert inside == pytest.approx(outside, abs=1e-3)
