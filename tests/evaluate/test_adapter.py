"""lm-eval's requests: the same ids and answers as its own adapter for transformers models."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from benchmarks.eval import import_hflm
from llmq.backends.base import ModelOptions, Run
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.engine.generate import Session
from llmq.engine.sampling import SamplingParams
from llmq.errors import BackendError, ConfigError
from llmq.evaluate.adapter import Adapter, prefix_token
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.packs import Limits, Request
from llmq.evaluate.tasks import TaskResults, load_tasks
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from tests.conftest import DATA
from tests.evaluate.local_data import write_tiny_model
from tests.test_smollm2 import oracle  # noqa: F401 - a fixture
from tests.tiny import byte_tokenizer_files, tiny_config

BOS = 1
CONFIG = ModelConfig.from_dict(tiny_config())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny_model(tmp_path_factory.mktemp("adapter") / "model")))


def tokenizer_of(changes: dict[str, Any] | None = None) -> Tokenizer:
    import json

    files = byte_tokenizer_files()
    settings = {**json.loads(files["tokenizer_config.json"]), **(changes or {})}
    return Tokenizer.from_files({**files, "tokenizer_config.json": json.dumps(settings).encode()}, CONFIG)


def adapter_of(
    weights: ModelWeights, tokenizer: Tokenizer | None = None, max_len: int = 64, seed: int = 0, num_slots: int = 1
) -> Adapter:
    options = ModelOptions(device="cpu", dtype="float32", max_len=max_len, num_slots=num_slots)
    model = load_backend("gpu").open_model(weights, options)
    tokenizer = tokenizer or tokenizer_of()
    return Adapter(model, tokenizer, prefix_token(tokenizer, weights.config), limits=Limits(64), seed=seed)


def instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def asked(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What an adapter asks its model from now on."""
    seen: list[Request] = []
    answer = adapter._answer
    monkeypatch.setattr(adapter, "_answer", lambda requests: (seen.extend(requests), answer(requests))[1])
    return seen


def llama3_tokenizer() -> Tokenizer:
    """A BOS that only the post-processor adds, and a chat template that writes it too, as Llama 3 has them."""
    import json

    import tokenizers
    from tokenizers.processors import TemplateProcessing

    files = byte_tokenizer_files()
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    settings = json.loads(files["tokenizer_config.json"])
    del settings["add_bos_token"]
    settings["chat_template"] = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    files |= {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    return Tokenizer.from_files(files, CONFIG)


def sent(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens in front of everything that an adapter scores or generates from now on."""
    model, seen = adapter._model, []
    score, set_slot = model.score, model.set_slot

    def scoring(state: Any, slot: int, shared: int, runs: Any) -> Any:
        assert shared == 0
        parents = [[] if run.parent is None else runs[run.parent].tokens.tolist() for run in runs]
        seen.extend(
            [*before, *run.tokens.tolist()]
            for before, run in zip(parents, runs, strict=True)
            if run.targets is not None
        )
        return score(state, slot, shared, runs)

    def setting(state: Any, slot: int, prompt: np.ndarray, sampling: Any) -> Any:
        seen.append(prompt.tolist())
        return set_slot(state, slot, prompt, sampling)

    monkeypatch.setattr(model, "score", scoring)
    monkeypatch.setattr(model, "set_slot", setting)
    return seen


class TestIds:
    """Exactly one BOS when the tokenizer has one, however the text came to be."""

    @pytest.mark.parametrize("make", [tokenizer_of, llama3_tokenizer])
    @pytest.mark.parametrize("chat", [False, True])
    def test_what_the_model_gets(
        self, weights: ModelWeights, make: Any, chat: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapter = adapter_of(weights, make())
        text = adapter.apply_chat_template([{"role": "user", "content": "tea"}]) if chat else "tea"
        seen = sent(adapter, monkeypatch)
        adapter.loglikelihood(instances("loglikelihood", (text, " cup"), ("", "cup")))
        adapter.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
        adapter.generate_until(instances("generate_until", (text, {"max_gen_toks": 2})))
        assert len(seen) == 4
        for tokens in seen:
            assert tokens[0] == BOS
            assert tokens.count(BOS) == 1

    @pytest.mark.parametrize("text", ["tea", "<s>tea"])
    def test_a_tokenizer_with_a_bos(self, weights: ModelWeights, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = tokenizer_of()
        adapter = adapter_of(weights, tokenizer)
        tea, cup = tokenizer.encode("tea")[1:], tokenizer.encode(" cup")[1:]
        seen = asked(adapter, monkeypatch)
        adapter.loglikelihood(instances("loglikelihood", (text, " cup"), ("", text)))
        adapter.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
        assert seen == [
            Request((BOS, *tea), tuple(cup)),
            Request((BOS,), tuple(tea)),
            Request((BOS,), tuple(tea)),
        ]

    def test_a_tokenizer_without_one(self, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = tokenizer_of({"bos_token": None, "add_bos_token": None})
        adapter = adapter_of(weights, tokenizer)
        seen = asked(adapter, monkeypatch)
        adapter.loglikelihood(instances("loglikelihood", ("tea", " cup"), ("", "tea")))
        eos = CONFIG.eos_token_ids[0]
        assert [request.context for request in seen] == [tuple(tokenizer.encode("tea")), (eos,)]
        assert BOS not in {token for request in seen for part in request for token in part}

    def test_a_bos_that_is_not_added(self, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
        """It still is what a text without a context follows, as in lm-eval."""
        tokenizer = tokenizer_of({"add_bos_token": False})
        adapter = adapter_of(weights, tokenizer)
        seen = asked(adapter, monkeypatch)
        adapter.loglikelihood(instances("loglikelihood", ("tea", " cup"), ("", "tea")))
        assert [request.context for request in seen] == [tuple(tokenizer.encode("tea")), (BOS,)]

    def test_a_template_that_writes_it(self, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
        template = "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}"
        tokenizer = tokenizer_of({"chat_template": template})
        adapter = adapter_of(weights, tokenizer)
        text = adapter.apply_chat_template([{"role": "user", "content": "tea"}])
        seen = asked(adapter, monkeypatch)
        adapter.loglikelihood(instances("loglikelihood", (text, " cup")))
        assert seen[0].context == tuple(tokenizer.encode_chat([{"role": "user", "content": "tea"}]))
        assert seen[0].context.count(BOS) == 1

    def test_spaces_move_to_the_continuation(self, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter = adapter_of(weights)
        seen = asked(adapter, monkeypatch)
        adapter.loglikelihood(instances("loglikelihood", ("tea  ", "cup")))
        tokenizer = tokenizer_of()
        assert seen == [Request(tuple(tokenizer.encode("tea")), tuple(tokenizer.encode("  cup")[1:]))]

    def test_neither_bos_nor_eos(self) -> None:
        tokenizer = tokenizer_of({"bos_token": None, "eos_token": None, "add_bos_token": None})
        tokenizer.eos_token_ids = frozenset()
        with pytest.raises(ConfigError, match="neither a BOS nor an EOS"):
            prefix_token(tokenizer, CONFIG.model_copy(update={"eos_token_ids": ()}))


class TestChat:
    def test_an_answer_that_was_begun_is_continued(self, weights: ModelWeights) -> None:
        history = [{"role": "user", "content": "tea?"}, {"role": "assistant", "content": "I think "}]
        text = adapter_of(weights).apply_chat_template(history, add_generation_prompt=False)
        assert text == "[user]tea?[assistant]I think"

    def test_a_template_without_system_messages(self, weights: ModelWeights) -> None:
        template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}[{{ m.content }}]{% endfor %}"
        adapter = adapter_of(weights, tokenizer_of({"chat_template": template}))
        history = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "tea?"}]
        assert adapter.apply_chat_template(history) == "[tea?]"


class TestTruncation:
    def test_prompts_are_cut_and_counted(self, weights: ModelWeights) -> None:
        adapter = adapter_of(weights, max_len=16)
        pairs = [("a" * 40, " b"), ("a" * 15, "b"), ("a" * 16, "b"), ("ab", "c")]
        answers = adapter.loglikelihood(instances("loglikelihood", *pairs))
        assert adapter.num_truncated == 2
        assert adapter.num_requests == 4
        tokenizer = tokenizer_of()
        kept = tokenizer.encode("a" * 40 + " b")[-17:]
        model = adapter._model
        run = Run(np.asarray(kept[:-1], np.int32), np.asarray(kept[1:], np.int32))
        _, (scores,) = model.score(model.init_state(), 0, 0, [run])
        assert answers[0][0] == pytest.approx(float(scores.logprobs[-2:].sum()), abs=1e-4)

    def test_a_continuation_that_does_not_fit(self, weights: ModelWeights) -> None:
        with pytest.raises(ConfigError, match="a continuation has 20 tokens"):
            adapter_of(weights, max_len=16).loglikelihood(instances("loglikelihood", ("a", "b" * 20)))

    def test_rolling_windows_cover_every_token_once(
        self, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapter = adapter_of(weights, max_len=16)
        text = "A text of forty characters, more or less."
        seen = asked(adapter, monkeypatch)
        (total,) = adapter.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
        assert [token for request in seen for token in request.continuation] == tokenizer_of().encode(text)[1:]
        assert [len(request.context) for request in seen] == [1, 1, 8]
        assert adapter.num_truncated == 0
        assert total == pytest.approx(sum(logprob for logprob, _ in adapter._answer(list(seen))))


class TestGenerate:
    def ask(self, adapter: Adapter, *arguments: tuple[str, dict[str, Any]]) -> list[str]:
        return adapter.generate_until(instances("generate_until", *arguments))

    def test_it_is_the_engines_greedy_text(self, weights: ModelWeights) -> None:
        adapter = adapter_of(weights)
        session = Session(adapter_of(weights)._model, tokenizer_of())
        list(session.generate(tokenizer_of().encode("tea"), SamplingParams(max_tokens=20)))
        whole = tokenizer_of().decode(session.last.tokens)
        assert self.ask(adapter, ("tea", {"max_gen_toks": 20, "until": []})) == [whole]
        stop = whole[5:7]
        (cut,) = self.ask(adapter, ("tea", {"max_gen_toks": 20, "until": [stop]}))
        assert cut == whole[: whole.index(stop)]

    def test_prompts_leave_room(self, weights: ModelWeights) -> None:
        adapter = adapter_of(weights, max_len=32)
        long, short = self.ask(
            adapter, ("x" * 60 + "tea", {"max_gen_toks": 8}), ("x" * 21 + "tea", {"max_gen_toks": 8})
        )
        assert adapter.num_truncated == 2
        assert long == short
        with pytest.raises(ConfigError, match="generates 32 tokens and leaves no room for a prompt"):
            self.ask(adapter, ("tea", {"max_gen_toks": 32}))

    def test_answers_do_not_depend_on_the_batch(self, weights: ModelWeights) -> None:
        sampled = {"do_sample": True, "temperature": 1.5}
        prompts = [
            (f"{'tea and ' * (i % 3)}{i}", {"max_gen_toks": 3 + 2 * i, **(sampled if i % 2 else {})}) for i in range(9)
        ]
        alone = [self.ask(adapter_of(weights), prompt)[0] for prompt in prompts]
        assert len(set(alone)) > 6
        for num_slots in (1, 4):
            assert self.ask(adapter_of(weights, num_slots=num_slots), *prompts) == alone
        assert self.ask(adapter_of(weights, num_slots=4), *prompts[::-1]) == alone[::-1]

    def test_answered_requests_are_not_asked_again(self, weights: ModelWeights) -> None:
        prompts = [(f"tea {i}", {"max_gen_toks": 4}) for i in range(3)]
        adapter = adapter_of(weights, num_slots=2)
        kept: dict[str, Any] = {}
        adapter._journal.add = kept.update
        texts = self.ask(adapter, *prompts)
        kept.popitem()
        again = adapter_of(weights, num_slots=2)
        again._journal.get = kept.get
        done: list[int] = []
        again._progress = lambda *args: done.append(args[1])
        assert self.ask(again, *prompts) == texts
        assert done == [3]

    def test_logits_that_are_no_numbers(self, weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter = adapter_of(weights)
        fetch = adapter._model.fetch
        monkeypatch.setattr(adapter._model, "fetch", lambda handle: replace(fetch(handle), tokens=np.array([-1])))
        with pytest.raises(BackendError, match="logits are not finite"):
            self.ask(adapter, ("tea", {"max_gen_toks": 4}))

    def test_repeated_samples_differ_and_are_reproducible(self, weights: ModelWeights) -> None:
        sampled = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
        first = self.ask(adapter_of(weights, seed=3), *[("tea", sampled)] * 3)
        assert len(set(first)) == 3
        assert self.ask(adapter_of(weights, seed=3), *[("tea", sampled)] * 3) == first


def run(task: str, limit: int, lm: Any) -> TaskResults:
    with load_tasks(EvalOptions(tasks=(task,), limit=limit, data_dir=DATA)) as tasks:
        return tasks.run(lm)


def responses(results: TaskResults, task: str) -> list[tuple[float, bool]]:
    found = []
    for sample in results.samples[task]:
        for ((response,),) in zip(sample["resps"], strict=True):
            found.append(tuple(response) if isinstance(response, list) else (response, False))
    return found


#: Task -> items that are compared. A page of wikitext is thousands of tokens, a truthfulqa prompt 600.
COMPARED = {"hellaswag": 20, "arc_easy": 20, "truthfulqa_mc2": 5, "wikitext": 1}


@pytest.fixture(scope="module")
def theirs(oracle: Any, smollm2_gguf: Path) -> Callable[..., TaskResults]:  # noqa: F811
    """What lm-eval's own adapter answers on the same weights; everything is computed once.

    Its softmax is taken in float64: the float32 one of torch on the CPU is off by 1e-5 a token, always upward.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)

    @cache
    def answers(task: str, dtype: str = "float32") -> TaskResults:
        model = oracle if dtype == "float32" else copy.deepcopy(oracle).to(getattr(torch, dtype))
        lm = import_hflm()(
            pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=2048, softmax_dtype=torch.float64
        )
        return run(task, COMPARED[task], lm)

    return answers


def ours(task: str, backend: str, dtype: Any, weights: ModelWeights) -> TaskResults:
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    model = load_backend(backend).open_model(weights, ModelOptions(device="cpu", dtype=dtype, max_len=2048))
    adapter = Adapter(model, tokenizer, prefix_token(tokenizer, weights.config), limits=Limits(256))
    return run(task, COMPARED[task], adapter)


@pytest.mark.slow
@pytest.mark.usefixtures("wikitext2")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize("task", COMPARED)
def test_log_likelihoods_equal_those_of_hflm(
    task: str, backend: str, smollm2: ModelWeights, theirs: Callable[..., TaskResults]
) -> None:
    found, expected = ours(task, backend, "float32", smollm2), theirs(task)
    pairs = list(zip(responses(found, task), responses(expected, task), strict=True))
    assert len(pairs) >= COMPARED[task]
    print(f"largest difference of {len(pairs)}: {max(abs(mine[0] - other[0]) for mine, other in pairs):.1e}")
    for mine, other in pairs:
        # A page is thousands of tokens, whose sum is told to a millionth.
        assert mine[0] == pytest.approx(other[0], abs=1e-3, rel=1e-6)
        assert mine[1] == other[1]
    assert found.metrics.keys() == expected.metrics.keys()
    for name, metric in found.metrics.items():
        assert metric.value == pytest.approx(expected.metrics[name].value, abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("wikitext2")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_in_bfloat16_the_error_is_no_larger_than_that_of_hflm(
    smollm2: ModelWeights, theirs: Callable[..., TaskResults]
) -> None:
    """Two implementations round at different places: each is compared with float32, not with the other.

    Which of two equal ones is a little nearer depends on the CPU.
    """
    task = "hellaswag"
    exact = np.array([logprob for logprob, _ in responses(theirs(task), task)])
    errors = [
        np.abs(np.array([logprob for logprob, _ in responses(results, task)]) - exact).mean()
        for results in (ours(task, "gpu", "bfloat16", smollm2), theirs(task, "bfloat16"))
    ]
    print(f"mean errors of {len(exact)} log-likelihoods: {errors[0]:.3f}, HFLM {errors[1]:.3f}")
    assert 0 < errors[0] <= 1.1 * errors[1]
