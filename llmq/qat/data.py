"""Data to examples: tokens, and which of them are to be learned.

A file that does not end in ``.jsonl`` or ``.json`` is one plain text. Of JSON rows, the first one
tells the kind of all:

    text, or page                          a document; every token is learned
    messages                               a conversation; what the assistant writes is learned
    instruction, input (optional), output  the output is learned
    prompt, completion                     the completion is learned

Whatever the model is to write ends with its end-of-sequence token, and that is learned as well.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from llmq.errors import ConfigError
from llmq.model.tokenizer import Tokenizer

#: How an instruction is put to a model without a chat template.
#: Source: tatsu-lab/stanford_alpaca, ``train.py``, ``PROMPT_DICT``.
_INSTRUCTION = (
    "Below is an instruction that describes a task{also}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{given}### Response:"
)


@dataclass(frozen=True, slots=True)
class Example:
    """A document.

    Attributes:
        tokens: int32 `[n]`, n at least 2.
        learned: bool `[n]`, which tokens are to be predicted from those before; the first one is not.
    """

    tokens: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True, slots=True)
class Examples:
    """All of a data set.

    Attributes:
        examples: In the order of the data.
        num_skipped: Malformed rows that were left out.
    """

    examples: list[Example]
    num_skipped: int


def read_examples(data: str, tokenizer: Tokenizer, *, skip_bad_rows: bool) -> Examples:
    """Read and tokenize.

    Args:
        data: A file or a hub id.
        tokenizer: The model's.
        skip_bad_rows: Count malformed rows rather than refuse them.

    Returns:
        The examples.

    Raises:
        ConfigError: The data cannot be read, is empty, or a row is malformed.
    """
    path = Path(data)
    is_file = path.exists() or data.count("/") != 1 or data.startswith((".", "~", "/"))
    if is_file and path.suffix not in (".jsonl", ".json"):
        return Examples([_document(tokenizer, _read_text(path), ends=False)], 0)
    examples: list[Example] = []
    make: Callable[[Tokenizer, Mapping[str, Any]], Example] | None = None
    num_skipped = 0
    for place, row in _file_rows(path) if is_file else _hub_rows(data):
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, dict):
                raise ValueError("must be a JSON object")
            make = make or _maker(row)
            example = make(tokenizer, row)
            if not example.learned.any():
                raise ValueError("leaves nothing to learn")
            examples.append(example)
        except (ValueError, ConfigError) as err:
            if not skip_bad_rows:
                raise ConfigError(f"{data}: {place}: {str(err).rstrip('.')}; mend it, or add --skip-bad-rows.") from err
            num_skipped += 1
    if not examples:
        raise ConfigError(f"{data}: holds no row to learn from ({num_skipped} malformed ones).")
    return Examples(examples, num_skipped)


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({getattr(err, 'strerror', None) or err}).") from err
    if not text.strip():
        raise ConfigError(f"{path}: is empty; give a text of some thousand words.")
    return text


def _file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each row stands, and the row; or the error that it is."""
    text = _read_text(path)
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"{path}: is not valid JSON ({err}).") from err
        if not isinstance(rows, list):
            raise ConfigError(f"{path}: must hold a list of rows; JSON lines end in .jsonl.")
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as err:
                yield f"line {number}", ValueError(f"is not valid JSON ({err})")


def _hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError
    except ImportError as err:
        raise ConfigError(
            f"data={name}: is no file here, and the hub needs the datasets library; install llmq[eval]."
        ) from err
    try:
        for number, row in enumerate(load_dataset(name, split="train"), 1):
            yield f"row {number}", row
    except (OSError, ValueError, DatasetNotFoundError) as err:
        reason = str(err).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"data={name}: neither a file nor to be had from the hub ({reason}).") from err


def _maker(row: Mapping[str, Any]) -> Callable[[Tokenizer, Mapping[str, Any]], Example]:
    for fields, make in _KINDS.items():
        if all(field in row for field in fields):
            return make
    kinds = "; ".join(" and ".join(fields) for fields in _KINDS)
    raise ValueError(f"has the fields {', '.join(row) or '(none)'}, and rows must have one of these: {kinds}")


def _text(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Example:
    return _document(tokenizer, _string(row, "text"), ends=True)


def _page(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Example:
    return _document(tokenizer, _string(row, "page"), ends=True)


def _document(tokenizer: Tokenizer, text: str, *, ends: bool) -> Example:
    tokens = [*tokenizer.encode(text), *(_end(tokenizer) if ends else ())]
    learned = np.ones(len(tokens), bool)
    learned[:1] = False
    return Example(np.asarray(tokens, np.int32), learned)


def _prompt(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Example:
    return _continued(tokenizer, _string(row, "prompt"), _string(row, "completion"))


def _instruction(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Example:
    instruction, output = _string(row, "instruction"), _string(row, "output")
    given = _string(row, "input") if row.get("input") else ""
    if tokenizer.has_chat_template:
        asked = f"{instruction}\n\n{given}" if given else instruction
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
        return _chat(tokenizer, {"messages": messages})
    also = ", paired with an input that provides further context" if given else ""
    shown = f"### Input:\n{given}\n\n" if given else ""
    return _continued(tokenizer, _INSTRUCTION.format(also=also, instruction=instruction, given=shown), output)


def _continued(tokenizer: Tokenizer, prompt: str, completion: str) -> Example:
    """Tokenized apart, because the prompt's tokens are all that the model will have before it answers."""
    before = tokenizer.encode(prompt)
    behind = tokenizer.encode(completion)
    behind = behind[1:] if tokenizer.adds_bos else behind
    tokens = [*before, *behind, *_end(tokenizer)]
    learned = np.arange(len(tokens)) >= max(1, len(before))
    return Example(np.asarray(tokens, np.int32), learned)


def _chat(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Example:
    """What the template writes between the opening of an assistant's turn and the end of it is learned."""
    if not tokenizer.has_chat_template:
        raise ValueError("is a conversation, and the model has no chat template")
    messages = _messages(row)
    tokens = np.asarray(tokenizer.encode_chat(messages, add_generation_prompt=False), np.int32)
    learned = np.zeros(len(tokens), bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = tokenizer.encode_chat(messages[:index], add_generation_prompt=True)
        closed = tokenizer.encode_chat(messages[: index + 1], add_generation_prompt=False)
        for shorter, longer in pairwise((opened, closed, tokens.tolist())):
            if longer[: len(shorter)] != shorter:
                raise ValueError(
                    f"message {index + 1}: the chat template does not write this turn behind those before it"
                )
        ends = [at for at in range(len(opened), len(closed)) if closed[at] in tokenizer.eos_token_ids]
        learned[len(opened) : ends[0] + 1 if ends else len(closed)] = True
    return Example(tokens, learned)


def _messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number}: must be an object with a role")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {number}: content must be text")
    if messages[0]["role"] == "assistant":
        raise ValueError("message 1: the assistant cannot begin")
    return messages


def _string(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} must be text, and not empty")
    return value


def _end(tokenizer: Tokenizer) -> list[int]:
    """What the model is to write behind its last word."""
    text = tokenizer.special_tokens.get("eos_token")
    ids = tokenizer.encode(text) if text else []
    return ids[-1:]


#: Fields of a row -> what makes an example of it.
_KINDS: MappingProxyType[tuple[str, ...], Callable[[Tokenizer, Mapping[str, Any]], Example]] = MappingProxyType(
    {
        ("messages",): _chat,
        ("instruction", "output"): _instruction,
        ("prompt", "completion"): _prompt,
        ("text",): _text,
        ("page",): _page,
    }
)
