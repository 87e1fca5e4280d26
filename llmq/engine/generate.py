"""The engine for one caller: prompt in, text out as it comes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llmq.backends.base import InferenceModel
from llmq.engine.engine import Engine
from llmq.engine.grammar import compile_grammar
from llmq.engine.request import Delta, FinishReason, PromptDone, Request
from llmq.engine.sampling import SamplingParams, resolve_seed
from llmq.errors import ConfigError
from llmq.model.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """What a request came to; filled in while it streams.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of these, how many were in the cache already.
        tokens: Generated ids, without an end or stop token.
        finish_reason: None until it is over.
        prefill_seconds: Until the first token.
        decode_seconds: From then on.
        seed: The seed used.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    seed: int | None = None


class Session:
    """A conversation: one answer at a time.

    Args:
        model: Opened with at least one slot; nobody else may use it meanwhile.
        tokenizer: Of the same model.

    Attributes:
        last: The latest completion.
    """

    def __init__(self, model: InferenceModel, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._engine = Engine(model, tokenizer)
        self.last = Completion(0)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """Answer a prompt. Leaving the iterator early aborts the answer.

        Args:
            prompt: Token ids.
            params: How to choose tokens; `n` must be 1.

        Yields:
            Text as it becomes certain; `last` holds the rest.

        Raises:
            ConfigError: A parameter asks for what the model does not have, or for more than one answer.
            CheckpointError: The prompt holds ids that the model does not have.
        """
        if params.n != 1:
            raise ConfigError(f"n={params.n}: a session gives one answer at a time; leave it at 1.")
        request = Request(tuple(prompt), resolve_seed(params))
        self._engine.check(request)
        matcher = None if params.grammar is None else compile_grammar(self._tokenizer, params.grammar)
        self.last = done = Completion(len(request.prompt), seed=request.params.seed)
        start = time.perf_counter()
        self._engine.submit(request, matcher)
        try:
            while done.finish_reason is None:
                yield from self._step(start)
        finally:
            self._engine.abort(request.id)

    def _step(self, start: float) -> list[str]:
        """One iteration; the texts it brought."""
        done, texts = self.last, list[str]()
        try:
            events = self._engine.step()
        except BaseException:  # an interrupt, too, can come between a call and its new state
            self._engine = Engine(self._model, self._tokenizer)
            raise
        for _, event in events:
            match event:
                case PromptDone():
                    done.cached_tokens = event.cached_tokens
                case Delta():
                    if not done.prefill_seconds:
                        done.prefill_seconds = time.perf_counter() - start
                    done.decode_seconds = time.perf_counter() - start - done.prefill_seconds
                    done.tokens += event.tokens
                    done.finish_reason = event.finish_reason
                    texts += [event.text] if event.text else []
        return texts
