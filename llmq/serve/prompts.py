"""Prompts as token ids. Everything here runs on the engine service's pool, not on the event loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmq.backends.base import Caps
from llmq.model.tokenizer import Tokenizer
from llmq.serve.errors import context_exceeded, invalid

#: Prompts of one request.
MAX_PROMPTS = 2048


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued.

    Attributes:
        tokens: Ids.
        text: As it is repeated by ``echo``; empty when it is not.
    """

    tokens: Sequence[int]
    text: str = ""


class Prompts:
    """Makes prompts for a model.

    Args:
        tokenizer: The model's.
        caps: The open model.

    Attributes:
        tokenizer: The model's.
        caps: The open model.
        template: The model's chat template; None for a base model.
    """

    def __init__(self, tokenizer: Tokenizer, caps: Caps) -> None:
        self.tokenizer = tokenizer
        self.caps = caps
        self.template = tokenizer.chat_template
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        self._max_bytes = longest * caps.max_len

    def plain(self, given: Any, *, with_text: bool = False) -> list[Prompt]:
        """The prompts of a completion.

        Args:
            given: A text, token ids, or a list of either.
            with_text: Tell their text, too.

        Returns:
            At least one.

        Raises:
            ApiError: It is something else, empty, or cannot fit the context.
        """
        several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
        prompts = given if several else [given]
        if len(prompts) > MAX_PROMPTS:
            raise invalid(f"prompt: has {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.", "prompt")
        return [
            self._plain(prompt, f"prompt[{i}]" if several else "prompt", with_text) for i, prompt in enumerate(prompts)
        ]

    def _plain(self, given: Any, param: str, with_text: bool) -> Prompt:
        if not isinstance(given, str | list):
            raise invalid("prompt: must be text, token ids, or a list of either.", param)
        if isinstance(given, str):
            self._check_size(given, param)
            tokens = self.tokenizer.encode(given) if given else []
            text = given
        else:
            tokens = given
            if any(type(token) is not int for token in tokens):
                raise invalid("prompt: must be text, token ids, or a list of either.", param)
            self.check_tokens(tokens, param)
            text = self.text(tokens) if with_text and len(tokens) <= self.caps.max_len else ""
        if not tokens:
            raise invalid("prompt: has no tokens; give some text.", param)
        return Prompt(tokens, text if with_text else "")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt of a conversation.

        Args:
            messages: As `messages.template_messages` gives them.
            tools: As `messages.template_tools` gives them.
            options: Further variables of the template.
            add_generation_prompt: End with the opening of the assistant's turn.

        Returns:
            Token ids.

        Raises:
            ApiError: It cannot fit the context.
            ConfigError: The template refuses it.
        """
        for i, message in enumerate(messages):
            self._check_size(message["content"], f"messages[{i}].content")
        return self.tokenizer.encode_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, template_options=options
        )

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Refuse ids that the model does not have.

        Args:
            tokens: Ids.
            param: The field they are in.

        Raises:
            ApiError: One is out of range.
        """
        vocab_size = self.caps.vocab_size
        outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise invalid(f"{param}: token {outside} is not in the vocabulary of {vocab_size}.", param)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Args:
            tokens: Ids.

        Returns:
            Text.
        """
        pieces: list[str] = []
        run: list[int] = []
        for token in tokens:
            if self.tokenizer.is_special(token):
                pieces += [self.tokenizer.decode(run), self.tokenizer.token_bytes(token).decode()]
                run = []
            else:
                run.append(token)
        return "".join([*pieces, self.tokenizer.decode(run)])

    def without_bos(self, text: str) -> list[int]:
        """The ids of a text, without the BOS that a prompt would get.

        Args:
            text: Any.

        Returns:
            Ids; a BOS that the text spells out is among them.
        """
        tokens = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_token_id
        if not self.tokenizer.adds_bos or bos is None or text.startswith(self.tokenizer.token_bytes(bos).decode()):
            return tokens
        return tokens[1:]

    def _check_size(self, text: str, param: str) -> None:
        """No token has more bytes than the longest; what is certain not to fit is not tokenized."""
        if len(text) > self._max_bytes:
            least = f"more than {self.caps.max_len}"
            raise context_exceeded(least, 0, self.caps.max_len, param)
