"""One answer of a request: from its tokens to text, and to its end."""

import numpy as np

from llmq.engine.grammar import Matcher
from llmq.engine.request import Delta, FinishReason, Request, TokenLogprobs
from llmq.engine.sampling import uniforms
from llmq.engine.stops import StopMatcher, StopTable
from llmq.model.tokenizer import TextStream

#: Random numbers made at once.
_UNIFORMS = 32


class Answer:
    """A choice that holds a slot.

    Args:
        request: Of which it is a choice; its seed is known.
        choice: Which one.
        slot: Where it is decoded.
        stream: Makes text of its tokens.
        stops: Its stop texts.
        matcher: Its grammar, at the beginning.
        eos_token_ids: The model's end tokens.
        vocab_size: The model's.

    Attributes:
        request: As given.
        slot: As given.
        num_dispatched: Tokens that were asked of the backend.
        num_tokens: Tokens it has; the one that ended it does not count.
        finish_reason: None until it is over.
        last_seconds: When it got its last token; for the engine to keep.
    """

    def __init__(
        self,
        request: Request,
        choice: int,
        slot: int,
        *,
        stream: TextStream,
        stops: tuple[StopTable, ...],
        matcher: Matcher | None,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        params = request.params
        self.request = request
        self.slot = slot
        self.num_dispatched = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.last_seconds = 0.0
        self._choice = choice
        self._stream = stream
        self._stops = StopMatcher(stops)
        self._matcher = matcher
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens
        self._eos_token_ids = eos_token_ids
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._vocab_size = vocab_size
        self._uniforms: list[float] = []

    @property
    def has_grammar(self) -> bool:
        """Whether what may come next depends on the last token."""
        return self._matcher is not None

    @property
    def wants_token(self) -> bool:
        """Whether another token is to be asked for, as far as is known."""
        return self.finish_reason is None and self.num_dispatched < self._max_tokens

    def next_uniform(self) -> float:
        """The random number of the token that is asked for next; 0 where none is used."""
        params, index = self.request.params, self.num_dispatched
        if params.temperature == 0:
            return 0.0
        if index % _UNIFORMS == 0:
            assert params.seed is not None
            self._uniforms = uniforms(params.seed, self._choice, index, _UNIFORMS)
        return self._uniforms[index % _UNIFORMS]

    def allowed(self) -> np.ndarray | None:
        """Which tokens may be asked for next: uint32 `[ceil(V / 32)]`, a bit each; None allows all.

        A grammar allows no id that the tokenizer does not have. All zeros: the answer cannot go on.
        """
        if self._matcher is not None:
            given = self._matcher.allowed()
            mask = np.zeros(-(-self._vocab_size // 32), np.uint32)
            mask[: len(given)] = given[: len(mask)]
            barred = self._eos_token_ids - self._end_ids  # `ignore_eos`, which the grammar does not know
        else:
            mask, barred = None, frozenset[int]()
        if self.num_dispatched < self._min_tokens:
            barred |= self._end_ids
        if not barred:
            return mask
        if mask is None:
            mask = np.full(-(-self._vocab_size // 32), 0xFFFFFFFF, np.uint32)
        for token in barred:
            if token < self._vocab_size:
                mask[token // 32] &= ~np.uint32(1 << token % 32)
        return mask

    def take(self, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Take the next token.

        Args:
            token: Its id; negative where the logits were not finite.
            logprobs: How likely it was, if that was asked for.

        Returns:
            What the answer has grown by.
        """
        if token < 0:
            return self._finish("error")
        if token in self._end_ids:
            return self._finish("stop", stop=token)
        self.num_tokens += 1
        text = self._stream.push(token)
        stop: str | None = None
        if self.num_tokens >= self._min_tokens:
            text, stop = self._stops.push(text)
        tokens, reported = (token,), (logprobs,) if logprobs else ()
        if stop is not None:
            self.finish_reason = "stop"
            return Delta(self._choice, text, tokens, reported, "stop", stop)
        reason: FinishReason | None = None
        if self._matcher is not None and not self._matcher.accept(token):
            reason = "error"
        elif self._matcher is not None and self._matcher.is_complete:
            reason = "stop"
        elif self.num_tokens == self._max_tokens:
            reason = "length"
        if reason is None:
            return Delta(self._choice, text, tokens, reported)
        return self._finish(reason, text, tokens, reported)

    def give_up(self) -> Delta:
        """End where nothing may follow: well if the grammar is satisfied, else as an error."""
        return self._finish("stop" if self._matcher is not None and self._matcher.may_end else "error")

    def _finish(
        self,
        reason: FinishReason,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        stop: str | int | None = None,
    ) -> Delta:
        """End, with the text that was kept back; it may still hold a stop."""
        rest, found = self._stream.finish(), None
        if self.num_tokens >= self._min_tokens:
            rest, found = self._stops.push(rest)
            if found is None:
                rest += self._stops.finish()
        if found is not None and reason != "error":
            reason, stop = "stop", found
        self.finish_reason = reason
        return Delta(self._choice, text + rest, tokens, logprobs, reason, stop)
