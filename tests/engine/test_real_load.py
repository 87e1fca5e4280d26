"""Answers of the real backends do not depend on what else is going on, to the last bit."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from llmq.backends.base import ModelOptions
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.engine.engine import Engine
from llmq.engine.request import Delta, PromptDone, Request
from llmq.engine.sampling import SamplingParams
from llmq.model.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer_files, write_tiny

#: Text, tokens, log-probabilities and reason of each answer of a request.
Outcome = dict[int, tuple[str, list[int], list[float], str | None]]


def mixed_requests(num_tokens: int, vocab_size: int) -> list[Request]:
    """32 of all kinds. Half of them begin alike, over more than one chunk of a prompt."""
    rng = np.random.default_rng(7)
    prefix = tuple(rng.integers(3, vocab_size, 150).tolist())
    kinds = [
        {"temperature": 0},
        {"temperature": 1, "seed": 11, "logprobs": 3},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 50, "seed": 3, "n": 2},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "seed": 5},
        {"temperature": 0, "logprobs": 0, "presence_penalty": 1.0},
        {"temperature": 0, "logit_bias": {5: 3.0}, "min_tokens": 4},
        {"temperature": 2, "seed": 1, "prompt_logprobs": 1},
    ]
    requests = []
    for i in range(32):
        tail = tuple(rng.integers(3, vocab_size, int(rng.integers(1, 40))).tolist())
        params = SamplingParams(max_tokens=num_tokens - i % 5, ignore_eos=bool(i % 3), **kinds[i % len(kinds)])
        requests.append(Request((*prefix, *tail) if i % 4 < 2 else tail, params, id=str(i)))
    return requests


def run(engine: Engine, requests: list[Request]) -> tuple[dict[str, Outcome], dict[str, PromptDone]]:
    """Submit all at once, and gather what comes."""
    for request in requests:
        engine.check(request)
        engine.submit(request)
    deltas: dict[str, dict[int, list[Delta]]] = defaultdict(lambda: defaultdict(list))
    prompts = {}
    while engine.has_work:
        for ident, event in engine.step():
            if isinstance(event, Delta):
                deltas[ident][event.choice].append(event)
            else:
                prompts[ident] = event
    outcomes = {
        ident: {
            choice: (
                "".join(part.text for part in parts),
                [token for part in parts for token in part.tokens],
                [row.logprob for part in parts for row in part.logprobs],
                parts[-1].finish_reason,
            )
            for choice, parts in choices.items()
        }
        for ident, choices in deltas.items()
    }
    return outcomes, prompts


def check(weights: ModelWeights, tokenizer: Tokenizer, backend: str, num_tokens: int, solo: slice) -> None:
    options = ModelOptions(device="cpu", num_slots=8, max_len=256)
    model = load_backend(backend).open_model(weights, options)
    requests = mixed_requests(num_tokens, tokenizer.vocab_size)
    engine = Engine(model, tokenizer)
    run(engine, requests[:2])
    together, prompts = run(engine, requests)
    assert len(together) == 32
    hits = [ident for ident, prompt in prompts.items() if prompt.cached_tokens]
    assert len(hits) >= 4, "prefixes were to be reused"
    for request in requests[solo]:
        alone, prompt = run(Engine(model, tokenizer), [request])  # a new engine knows no prefix
        assert not prompt[request.id].cached_tokens
        assert together[request.id] == alone[request.id], request
        assert prompts[request.id].logprobs == prompt[request.id].logprobs


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_tiny(backend: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m", num_hidden_layers=2)
    for name, content in byte_tokenizer_files().items():
        (source / name).write_bytes(content)
    convert(plan_conversion(str(source), QuantizationConfig(scheme="int4_blockwise")), tmp_path / "q")
    weights = load_weights(str(tmp_path / "q"))
    check(weights, Tokenizer.from_files(weights.reader.side_files(), weights.config), backend, 16, slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_smollm2(backend: str, smollm2_int4: Path) -> None:
    weights = load_weights(str(smollm2_int4))
    check(weights, Tokenizer.from_files(weights.reader.side_files(), weights.config), backend, 12, slice(None, None, 5))
