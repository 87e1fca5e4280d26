"""Text to token ids and back: prompts, chats, and text that arrives token by token.

Everything comes from the model's own side files, through the tokenizers and jinja2 libraries.

Exactly one BOS: a tokenizer *has* a BOS when ``tokenizer_config.json`` says ``add_bos_token``, or
else when its post-processor adds one. Then every prompt begins with one, whether a chat template
writes it or not; a BOS that is already there is not doubled.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import tokenizers

from llmq.errors import CheckpointError, ConfigError
from llmq.model.chat import ChatTemplate, reason
from llmq.model.config import ModelConfig
from llmq.model.spelled import Hidden, replaced
from llmq.model.stream import TextStream

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

#: A token of a single byte in vocabularies with byte fallback.
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A model's tokenizer, chat template and end-of-sequence tokens; `from_files` makes one.

    Args:
        backend: The library's tokenizer.
        special_tokens: As the attribute.
        bos_token_id: As the attribute.
        adds_bos: As the attribute.
        eos_token_ids: As the attribute.
        chat_template: As the attribute.
        generation_defaults: As the attribute.

    Attributes:
        special_tokens: Name -> text, as in ``bos_token``.
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
        self.special_tokens = special_tokens
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos
        self.eos_token_ids = eos_token_ids
        self.vocab_size = backend.get_vocab_size()
        self.chat_template = chat_template
        self._template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        self.generation_defaults = generation_defaults
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        # Longest first: where one token's name begins with another's, the whole name is meant.
        special = sorted((item for item in added.items() if item[1].special), key=lambda item: -len(item[1].content))
        self._special = {token.content: i for i, token in special}
        self._special_ids = frozenset(self._special.values())
        self._is_byte_level = "ByteLevel" in str(backend.decoder)

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
        return self._with_bos(_encode(self._backend, text))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The ids of a conversation, as `render_chat` writes it.

        Only the template writes special tokens: one that is spelled out inside a message or a tool is
        the text it looks like.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: End with the opening of the assistant's turn.
            tools: Functions the model may call, as OpenAI describes them.
            template_options: Further variables of the template, as ``enable_thinking``.

        Returns:
            Ids, with exactly one BOS in front when the template or the tokenizer has one.

        Raises:
            ConfigError: As for `render_chat`.
        """
        hidden = Hidden({"messages": messages, "tools": tools}, list(self._special))
        if not hidden.spelled:
            return self.encode(self.render_chat(messages, add_generation_prompt, tools, template_options))
        given, spelled = hidden.stand_ins()
        text = self.render_chat(given["messages"], add_generation_prompt, given["tools"], template_options)
        mark = hidden.mark()
        marked = {token: f"{mark}{i}{mark}" for token, i in self._special.items()}
        text = replaced(replaced(text, marked), spelled)
        backend = self._marked(mark)
        back = {backend.token_to_id(name): self._special[token] for token, name in marked.items()}
        return self._with_bos([back.get(token, token) for token in _encode(backend, text)])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a conversation. A special token written inside a message stays one.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: End with the opening of the assistant's turn.
            tools: Functions the model may call.
            template_options: Further variables of the template.

        Returns:
            What the model's chat template makes of them.

        Raises:
            ConfigError: There is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ConfigError("messages: the model has no chat template; send a plain prompt, or serve a chat model.")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, options=template_options
        )

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    @lru_cache(maxsize=4)  # noqa: B019 - a tokenizer lives as long as the process
    def _marked(self, mark: str) -> tokenizers.Tokenizer:
        """The tokenizer whose special tokens are called ``<mark><id><mark>``; their ids are its own."""
        contents = json.loads(self._backend.to_str())
        contents["post_processor"] = None
        for token in contents["added_tokens"]:
            if token["special"]:
                token["content"] = f"{mark}{token['id']}{mark}"
        return tokenizers.Tokenizer.from_str(json.dumps(contents))

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token, which `decode` leaves out.

        Args:
            token_id: Its id.

        Returns:
            True for one that the tokenizer's files call special.
        """
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, wherever it is: a character's bytes may be spread over tokens.

        Args:
            token_id: Its id.

        Returns:
            Bytes; those of its name for a special token, none for an id that has no token.
        """
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF.get(character, ord("?")) for character in token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def backend_json(self) -> str:
        """The contents of a ``tokenizer.json``."""
        return self._backend.to_str()

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens.

        Args:
            ids: Token ids.

        Returns:
            Text; bytes that are no character become U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """Decode token by token.

        Args:
            prompt: What the tokens continue; it keeps the space in front of their first word.

        Returns:
            A stream for one sequence.
        """
        return TextStream(self.decode, prompt)


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        # `encode` would keep every other thread waiting, half a second for 440 kB; this lets them run.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError as err:
        raise ConfigError("prompt: holds half of a surrogate pair, which is not text; send valid Unicode.") from err


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte.

    Source:
        openai/gpt-2 ``src/encoder.py``, ``bytes_to_unicode``.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _backend(files: Mapping[str, bytes]) -> tokenizers.Tokenizer:
    if "tokenizer.json" not in files:
        raise CheckpointError(
            "tokenizer.json: the model has none; save it beside the weights with "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY) from transformers."
        )
    try:
        backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    except ValueError as err:
        raise CheckpointError(f"tokenizer.json: is not a tokenizer ({reason(err)}); fetch it again.") from err
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{name}: is not valid JSON ({reason(err)}).") from err
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
            f"chat_template: is neither text nor a list of names and templates ({reason(err)})."
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
