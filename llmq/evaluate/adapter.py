"""lm-eval's view of a model: its requests, answered by `scoring` and the engine.

Prompts come from the tokenizer that ``llmq generate`` uses. How text becomes context and
continuation, and what is cut from a prompt that is too long, is lm-eval's own, as in its
``HFLM``; so its log-likelihoods are equal item by item. One thing differs on purpose: a tokenizer with a BOS puts one in front
of a rolling text, where ``HFLM`` puts two.

Source: lm_eval/models/huggingface.py and lm_eval/api/model.py, 0.4.13.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llmq.backends.base import InferenceModel
from llmq.checkpoint.reader import Progress, no_progress
from llmq.config import validated
from llmq.engine.engine import Engine, EngineLimits
from llmq.engine.request import PromptDone
from llmq.engine.request import Request as Prompt
from llmq.engine.sampling import SamplingParams
from llmq.errors import BackendError, ConfigError
from llmq.evaluate.journal import Journal
from llmq.evaluate.packs import Limits, Request, fit
from llmq.evaluate.scoring import Answer, Scorer
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer

#: Tokens to generate for a task that does not say, as in lm-eval.
_MAX_GEN_TOKENS = 256


def prefix_token(tokenizer: Tokenizer, config: ModelConfig) -> int:
    """The token that a text without a context follows: the BOS, or else an end-of-sequence token.

    Args:
        tokenizer: The model's.
        config: The model's.

    Returns:
        Its id.

    Raises:
        ConfigError: There is neither.
    """
    ends = (*config.eos_token_ids, *sorted(tokenizer.eos_token_ids))
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if not ends:
        raise ConfigError(
            "tokenizer: has neither a BOS nor an EOS for a text to follow; name one in tokenizer_config.json."
        )
    return ends[0]


class Adapter(TemplateLM):
    """A model for lm-eval's evaluator.

    Args:
        model: Open, with at least one slot.
        tokenizer: Of the same model.
        prefix: See `prefix_token`.
        limits: What one call may hold.
        seed: For tasks that sample.
        journal: Holds finished answers.
        progress: Told of every answer.

    Attributes:
        num_truncated: Prompts that were cut to fit the model.
        num_requests: Requests answered.
    """

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: Tokenizer,
        prefix: int,
        *,
        limits: Limits,
        seed: int = 0,
        journal: Journal | None = None,
        progress: Progress = no_progress,
    ) -> None:
        super().__init__()
        self._model = model
        self._max_length = model.caps.max_len
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._limits = limits
        self._seed = seed
        self._journal = Journal(None, {}) if journal is None else journal
        self._progress = progress
        self.num_truncated = 0
        self.num_requests = 0

    @property
    def eot_token_id(self) -> int:
        """The token before a text without a context; see `prefix_token`."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of prompts, which are not used."""
        return ""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs: Any) -> list[int]:
        """The ids of a text.

        Args:
            string: The text.
            add_special_tokens: False leaves out the BOS.
            **_kwargs: Not used.

        Returns:
            Ids, with exactly one BOS in front when the tokenizer has one.
        """
        ids = self._tokenizer.encode(string)
        return ids[1:] if add_special_tokens is False and self._begins_with_bos(ids) else ids

    def _begins_with_bos(self, ids: list[int]) -> bool:
        return self._tokenizer.adds_bos and ids[:1] == [self._tokenizer.bos_token_id]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            chat_history: Messages. Those of the system are left out where the template refuses them.
            add_generation_prompt: False ends with the last message, to be continued.

        Returns:
            The text.
        """
        try:
            text = self._tokenizer.render_chat(chat_history, add_generation_prompt)
        except ConfigError:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            text = self._tokenizer.render_chat(without, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Answers in the order of the requests, each a key and the ids of context and continuation."""
        pairs = [Request(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        return [(logprob, is_greedy) for logprob, is_greedy in self._answer(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Log-likelihoods of whole texts, in windows of the model's length that do not overlap.

        Args:
            requests: Their argument is the text.
            disable_tqdm: Not used.

        Returns:
            One sum a text.
        """
        windows = [list(self._windows(request.args[0])) for request in requests]
        answers = iter(self._answer([pair for pairs in windows for pair in pairs]))
        return [float(sum(next(answers).logprob for _ in pairs)) for pairs in windows]

    def _windows(self, text: str) -> Iterator[Request]:
        tokens = self.tok_encode(text)
        if tokens[:1] == [self._prefix]:
            tokens = tokens[1:]
        for window in get_rolling_token_windows(tokens, self._prefix, self._max_length, context_len=1):
            context, continuation = make_disjoint_window(window)
            yield Request(tuple(context), tuple(continuation))

    def _answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Score requests that the journal does not have; answers in their order."""
        fitting = [fit(request, self._max_length) for request in requests]
        self.num_truncated += sum(request != fitted for request, fitted in zip(requests, fitting, strict=True))
        self.num_requests += len(requests)
        keys = {request: _key(request) for request in fitting}
        found = {request: self._journal.get(key) for request, key in keys.items()}
        known = {request: Answer(*answer) for request, answer in found.items() if answer is not None}
        counts = Counter(fitting)
        done = sum(counts[request] for request in known)
        for answers in Scorer(self._model, self._limits).answers(fitting, known):
            self._journal.add({keys[request]: answer for request, answer in answers.items()})
            known.update(answers)
            done += sum(counts[request] for request in answers)
            self._progress("requests", done, len(fitting))
        return [known[request] for request in fitting]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Texts that continue prompts.

        Args:
            requests: Their arguments are the prompt and lm-eval's parameters of generation.
            disable_tqdm: Not used.

        Returns:
            One text a request, up to the first of its stop strings.
        """
        self.num_requests += len(requests)
        arguments: list[Any] = [request.args for request in requests]
        prompts = [self._prompt(text, wanted) for text, wanted in arguments]
        seen: Counter[str] = Counter()
        asked: dict[str, tuple[Prompt, list[str]]] = {}
        for prompt, params, stops in prompts:
            key = _key((prompt, params.model_dump(mode="json", exclude_defaults=True)))
            seen[key] += 1  # a task may ask the same several times, to sample several answers
            params = params.model_copy(update={"seed": self._seed + seen[key] - 1})
            name = f"{key}/{seen[key]}"
            asked[name] = Prompt(prompt, params, id=name), stops
        texts = {name: text for name in asked if (text := self._journal.get(name)) is not None}
        # Prompts that begin alike come one after the other: what they share is in the cache.
        missing = sorted((asked[name][0] for name in asked if name not in texts), key=lambda request: request.prompt)
        for name, tokens in _generate(self._model, self._tokenizer, missing):
            texts[name] = postprocess_generated_text(self._tokenizer.decode(tokens), asked[name][1], None)
            self._journal.add({name: texts[name]})
            self._progress("answers", len(texts), len(asked))
        return [texts[name] for name in asked]

    def _prompt(self, text: str, wanted: dict[str, Any]) -> tuple[tuple[int, ...], SamplingParams, list[str]]:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(wanted, _MAX_GEN_TOKENS))
        max_tokens = kwargs["max_gen_toks"]
        room = self._max_length - max_tokens
        if room < 1:
            raise ConfigError(
                f"max_model_len={self._max_length}: a task generates {max_tokens} tokens and leaves no room for a prompt; raise --max-model-len."
            )
        ids = self.tok_encode(text)
        self.num_truncated += len(ids) > room
        stops: list[str] = [stop for stop in kwargs["until"] if stop]
        params = validated(
            SamplingParams,
            max_tokens=max_tokens,
            temperature=kwargs.get("temperature", 1.0) if kwargs["do_sample"] else 0.0,
            top_p=kwargs.get("top_p", 1.0),
            top_k=kwargs.get("top_k", 0),
            stop=tuple(stops),
        )
        return tuple(ids[-room:]), params, stops


def _generate(
    model: InferenceModel, tokenizer: Tokenizer, requests: Sequence[Prompt]
) -> Iterator[tuple[str, list[int]]]:
    """Answer requests, as many at once as the model has slots: the id and the tokens of each that is done."""
    running = Engine(model, tokenizer, EngineLimits(max_queue=len(requests)))
    for request in requests:
        running.check(request)
        running.submit(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    while running.has_work:
        for name, event in running.step():
            if isinstance(event, PromptDone):
                continue
            tokens[name] += event.tokens
            if event.finish_reason == "error":
                raise BackendError(
                    "generate_until: the model's logits are not finite; check its weights with llmq inspect --verify."
                )
            if event.finish_reason:
                yield name, tokens.pop(name)


def _key(request: Any) -> str:
    """A name for a request in the journal."""
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:32]
