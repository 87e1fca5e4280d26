"""What a model cannot answer is refused before it is queued, in a sentence that names the field."""

from collections.abc import Iterable, Sequence

from llmq.backends.base import Caps
from llmq.engine.request import Request
from llmq.engine.sampling import SamplingParams
from llmq.errors import CheckpointError, ConfigError


def check_prompt(prompt: Sequence[int], params: SamplingParams, max_len: int, vocab_size: int) -> None:
    """Refuse a prompt that a model cannot answer.

    Args:
        prompt: Token ids.
        params: Uses `max_tokens`.
        max_len: Positions of a slot.
        vocab_size: Rows of the embedding.

    Raises:
        ConfigError: The prompt is empty, or it and `max_tokens` exceed `max_len`.
        CheckpointError: The tokenizer gives ids that the model does not have.
    """
    num_tokens = len(prompt)
    if num_tokens == 0:
        raise ConfigError("prompt: has no tokens; give some text.")
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise CheckpointError(
            f"token {outside}: the tokenizer gives it, but the model's vocabulary has {vocab_size}; they do not belong together."
        )
    if num_tokens + params.max_tokens > max_len:
        raise ConfigError(
            f"prompt of {num_tokens} tokens and max_tokens={params.max_tokens}: exceed the context of {max_len}; "
            "shorten the prompt, lower --max-tokens or raise --max-model-len."
        )


def check_request(request: Request, caps: Caps) -> None:
    """Refuse a request that a model cannot answer.

    Args:
        request: What is asked.
        caps: The model.

    Raises:
        ConfigError: A field asks for what the model does not have.
        CheckpointError: The prompt holds ids that the model does not have.
    """
    params = request.params
    check_prompt(request.prompt, params, caps.max_len, caps.vocab_size)
    if params.n > caps.num_slots:
        raise ConfigError(
            f"n={params.n}: exceeds the {caps.num_slots} slots of this engine; ask for fewer answers or raise --max-num-seqs."
        )
    if params.min_tokens > params.max_tokens:
        raise ConfigError(
            f"min_tokens={params.min_tokens}: exceeds max_tokens={params.max_tokens}; lower it or raise max_tokens."
        )
    _check_ids("stop_token_ids", params.stop_token_ids, caps.vocab_size)
    _check_ids("logit_bias", params.logit_bias, caps.vocab_size)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    outside = next((token for token in ids if token >= vocab_size), None)
    if outside is not None:
        raise ConfigError(f"{field}: token {outside} is outside the model's vocabulary of {vocab_size}; leave it out.")
