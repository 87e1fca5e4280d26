"""Text to token ids and back: prompts, chats, and text that arrives token by token.

Everything comes from the model's own side files, through the tokenizers and jinja2 libraries.

Exactly one BOS: a tokenizer *has* a BOS when ``tokenizer_config.json`` says ``add_bos_token``, or
else when its post-processor adds one. Then every prompt begins with one, whether a chat template
writes it or not; a BOS that is already there is not doubled.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmq.errors import CheckpointError, ConfigError
from llmq.model.config import ModelConfig

#: Tokens that end a turn in the chat templates of known families.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>",
    "</s>",
)

#: Fields of ``generation_config.json`` that are defaults of a request.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

#: What a decoder writes for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A model's tokenizer, chat template and end-of-sequence tokens; `from_files` makes one.

    Args:
        backend: The library's tokenizer.
        special_tokens: Name -> text, for the chat template.
        bos_token_id: As the attribute.
        adds_bos: As the attribute.
        eos_token_ids: As the attribute.
        chat_template: As the attribute.
        generation_defaults: As the attribute.

    Attributes:
        bos_token_id: Beginning-of-sequence token; None where there is none.
        adds_bos: Whether prompts begin with it.
        eos_token_ids: Every token that ends a text or a turn.
        vocab_size: Number of tokens, added ones included.
        chat_template: Jinja source; None for a base model.
        generation_defaults: Sampling parameters the model's authors recommend.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        bos_token_id: int | None,
        adds_bos: bool,
        eos_token_ids: frozenset[int],
        chat_template: str | None,
        generation_defaults: Mapping[str, float],
    ) -> None:
        self._backend = backend
        self._special_tokens = special_tokens
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos
        self.eos_token_ids = eos_token_ids
        self.vocab_size = backend.get_vocab_size()
        self.chat_template = chat_template
        self.generation_defaults = generation_defaults

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], config: ModelConfig) -> "Tokenizer":
        """Build from a model's side files.

        Args:
            files: Name -> contents, as `CheckpointReader.side_files` gives them.
            config: The model; adds its BOS and end tokens where the files name none.

        Returns:
            The tokenizer.

        Raises:
            CheckpointError: ``tokenizer.json`` is missing, or a file is damaged.
        """
        backend = _backend(files)
        settings = {**_read_json(files, "special_tokens_map.json"), **_read_json(files, "tokenizer_config.json")}
        generation = _read_json(files, "generation_config.json")
        special = {
            key: token
            for key, value in settings.items()
            if key.endswith("_token") and (token := _content(value)) is not None
        }
        template = _chat_template(files, settings)
        bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
        if "bos_token" not in settings:
            bos = config.bos_token_id
        return cls(
            backend,
            special_tokens=special,
            bos_token_id=bos,
            adds_bos=_adds_bos(backend, bos, settings.get("add_bos_token")),
            eos_token_ids=frozenset(
                {
                    *_token_ids(generation.get("eos_token_id")),
                    *config.eos_token_ids,
                    *_present(backend, [special.get("eos_token", "")]),
                    *_present(backend, [token for token in END_OF_TURN if token in (template or "")]),
                }
            ),
            chat_template=template,
            generation_defaults=MappingProxyType(_generation_defaults(generation)),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt that is to be continued.

        Args:
            text: May be empty, and may contain special tokens.

        Returns:
            Ids, with exactly one BOS in front when the tokenizer has one, and no EOS behind.

        Raises:
            ConfigError: The text holds half of a surrogate pair, which no encoding can express.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as err:
            raise ConfigError("prompt: holds half of a surrogate pair, which is not text; send valid Unicode.") from err
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation, as `render_chat` writes it.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: End with the opening of the assistant's turn.

        Returns:
            Ids, with exactly one BOS in front when the template or the tokenizer has one.

        Raises:
            ConfigError: As for `render_chat`.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. A special token written inside a message stays one.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: End with the opening of the assistant's turn.

        Returns:
            What the model's chat template makes of them.

        Raises:
            ConfigError: There is no template, or it refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except ConfigError:
            raise
        except Exception as err:  # a template is a foreign program: it can fail in any way
            raise ConfigError(f"messages: the model's chat template refuses them ({_reason(err)}).") from err

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise ConfigError("messages: the model has no chat template; send a plain prompt, or serve a chat model.")
        try:
            return _environment().from_string(self.chat_template)
        except jinja2.TemplateError as err:
            raise ConfigError(f"messages: the model's chat template is not valid Jinja ({_reason(err)}).") from err

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens.

        Args:
            ids: Token ids.

        Returns:
            Text; bytes that are no character become U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> "TextStream":
        """Decode token by token.

        Args:
            prompt: What the tokens continue; it keeps the space in front of their first word.

        Returns:
            A stream for one sequence.
        """
        return TextStream(self, prompt)


class TextStream:
    """Text that grows by one token at a time.

    The pieces, joined, are ``decode(prompt + ids)`` without ``decode(prompt)``. A piece never holds
    U+FFFD for a character whose bytes are spread over tokens: those are kept back until it is whole.

    Each step decodes a window: the tokens of the last piece, which fix how the next one starts, and
    those not shown yet. ``tokenizers.DecodeStream`` works like this, but fails for good on invalid
    bytes after a byte-fallback character.

    Args:
        tokenizer: Decodes.
        prompt: What the tokens continue.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._window = list(prompt)
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window).rstrip(_REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Take the next token.

        Args:
            token_id: Its id.

        Returns:
            The text it completes, often one word; empty while a character is incomplete.
        """
        self._window.append(token_id)
        text = self._unshown()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return text

    def finish(self) -> str:
        """The text still kept back: a character that stayed incomplete, as U+FFFD."""
        text = self._unshown()
        self._window, self._num_shown, self._shown = [], 0, ""
        return text

    def _unshown(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._window[self._num_shown :])  # invalid bytes spoiled the characters before them


class _GenerationTag(Extension):
    """Accepts ``{% generation %}``, which marks the assistant's text for training, and prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 does not declare it a ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment chat templates are written for, as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # makes text without end
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _reason(err: Exception) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0].rstrip(".")


def _backend(files: Mapping[str, bytes]) -> tokenizers.Tokenizer:
    if "tokenizer.json" not in files:
        raise CheckpointError(
            "tokenizer.json: the model has none; save it beside the weights with "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY) from transformers."
        )
    try:
        backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    except ValueError as err:
        raise CheckpointError(f"tokenizer.json: is not a tokenizer ({_reason(err)}); fetch it again.") from err
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{name}: is not valid JSON ({_reason(err)}).") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: must hold a JSON object.")
    return value


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    try:
        if "chat_template.jinja" in files:
            return files["chat_template.jinja"].decode()
        template = settings.get("chat_template", _read_json(files, "chat_template.json").get("chat_template"))
        if isinstance(template, list):
            return next((row["template"] for row in template if row["name"] == "default"), None)
    except (UnicodeDecodeError, KeyError, TypeError) as err:
        raise CheckpointError(
            f"chat_template: is neither text nor a list of names and templates ({_reason(err)})."
        ) from err
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"chat_template: is neither text nor a list of names and templates, but {template!r}.")
    return template


def _content(token: Any) -> str | None:
    """The text of a special token, which is stored plainly or as an added token."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _adds_bos(backend: tokenizers.Tokenizer, bos: int | None, declared: bool | None) -> bool:
    if bos is None:
        return False
    return backend.encode("a").ids[:1] == [bos] if declared is None else declared


def _token_ids(value: Any) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"generation_config.json: eos_token_id={value!r}: must be a token id or a list of them.")
    return ids


def _present(backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> list[int]:
    return [i for i in (backend.token_to_id(token) for token in tokens) if i is not None]


def _generation_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    if not generation.get("do_sample", False):
        return {}
    found = {field: generation[field] for field in SAMPLING_FIELDS if generation.get(field) is not None}
    if found.get("top_k") == -1:  # another spelling of all
        found["top_k"] = 0
    return found
