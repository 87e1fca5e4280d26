"""Answers that match a grammar: which tokens may come next, by llguidance.

llguidance does not raise: a bad grammar or an exhausted limit is a state that has to be asked for.
Work is bounded: the length of the source here, and llguidance's limits on the size of the compiled
grammar and on the work of each token.
"""

import json
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from llmq.engine.sampling import Grammar
from llmq.errors import ConfigError
from llmq.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Longer sources are refused.
MAX_CHARACTERS = 1 << 16

#: Between the parts of JSON: a space, or a new line and its indentation. With more, a small model would
#: rather write blanks than an answer.
_WHITE_SPACE = r"( |\n {0,24})?"

#: Limits of llguidance; of its work, at the speeds it states, 10 ms to build the lexer and 15 ms for a mask.
_INITIAL_FUEL = 500_000
_STEP_FUEL = 200_000
_MAX_SYMBOLS = 100_000

_MAX_REASON = 200


class Matcher:
    """Follows one answer through a grammar; `compile_grammar` makes one.

    Args:
        backend: llguidance's matcher.
    """

    def __init__(self, backend: "LLMatcher") -> None:
        self._backend = backend

    def allowed(self) -> np.ndarray:
        """Which tokens may come next: uint32 `[ceil(V / 32)]` for the tokenizer's V tokens, a bit each.

        End tokens are among them where the answer may end. An id that the tokenizer does not have is
        never allowed. All zeros when the grammar exceeded a limit.
        """
        mask = np.frombuffer(self._backend.compute_bitmask(), np.uint32)
        return np.zeros_like(mask) if self._backend.is_error() else mask

    def accept(self, token: int) -> bool:
        """Go on.

        Args:
            token: The next one.

        Returns:
            False if it was not allowed; the matcher must not be used after that.
        """
        return self._backend.consume_token(token)

    @property
    def may_end(self) -> bool:
        """Whether the answer matches as it is."""
        return self._backend.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether it matches and nothing can be added."""
        return self._backend.is_stopped() and not self._backend.is_error()

    def copy(self) -> "Matcher":
        """Another one in the same state."""
        return Matcher(self._backend.deep_copy())


def compile_grammar(tokenizer: Tokenizer, grammar: Grammar) -> Matcher:
    """Prepare to follow answers through a grammar; takes up to a second, and is safe on any thread.

    Args:
        tokenizer: Of the model; its end tokens end an answer.
        grammar: What the answers must match.

    Returns:
        A matcher at the beginning of an answer.

    Raises:
        ConfigError: The grammar is not valid, too large, or uses what llguidance does not support; or
            llguidance is not installed.
    """
    if len(grammar.source) > MAX_CHARACTERS:
        raise ConfigError(
            f"grammar: has {len(grammar.source)} characters; at most {MAX_CHARACTERS} are allowed, shorten it."
        )
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError as err:
        raise ConfigError("grammar: needs llguidance, which is not installed; pip install 'llmq[serve]'.") from err
    source = _llguidance_source(grammar)
    limits = LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        max_grammar_size=_MAX_SYMBOLS,
        verbose_errors=False,
    )
    backend = LLMatcher(_llguidance_tokenizer(tokenizer), source, log_level=0, limits=limits)
    if not backend.is_error():
        backend.compute_bitmask()  # the first mask builds most of the lexer, and may exceed a limit
    if backend.is_error():
        raise ConfigError(f"grammar: is not a valid {grammar.kind} ({_reason(backend.get_error())}).")
    return Matcher(backend)


def _llguidance_source(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            schema = _json_object(grammar.source)
            try:
                return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _WHITE_SPACE})
            except ValueError as err:  # nested too deeply
                raise ConfigError(f"grammar: is not a valid json_schema ({_reason(str(err))}).") from err
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)


def _json_object(source: str) -> str:
    """`source`, certain to be one JSON object: llguidance pastes it into JSON of its own."""
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"grammar: is not a valid json_schema ({_reason(str(err))}).") from err
    if not isinstance(value, dict):
        raise ConfigError("grammar: is not a valid json_schema (it must be a JSON object).")
    return json.dumps(value)


@lru_cache(maxsize=1)
def _llguidance_tokenizer(tokenizer: Tokenizer) -> "LLTokenizer":
    from llguidance import LLTokenizer

    if not tokenizer.eos_token_ids:
        raise ConfigError("grammar: needs a model with an end-of-sequence token; name one in generation_config.json.")
    return LLTokenizer(tokenizer.backend_json(), eos_token=sorted(tokenizer.eos_token_ids))


def _reason(error: str) -> str:
    """The beginning of a message that may quote the whole grammar, as one line."""
    return " ".join(error.removesuffix("<non-verbose/>")[:_MAX_REASON].split()).rstrip(".") or "no reason given"
