"""Chat templates: a model's own program that writes a conversation as text.

It is a foreign program, so it runs in jinja2's sandbox, with an end to its time, to its output
and to what a single operation may make.
"""

import functools
import inspect
import json
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmq.errors import ConfigError

#: Real templates take milliseconds.
MAX_SECONDS = 5.0

#: Characters of a rendered conversation: more than the contexts of models hold.
MAX_CHARACTERS = 16_000_000

#: Of memory beyond what the process has held so far.
MAX_BYTES = 1 << 29

#: A width, or an exponent, beyond any use.
MAX_NUMBER = 100_000
_WIDE = re.compile(r"\d{6}")

#: Operations that a number makes large, whatever the other operand is.
_SIZED = ("**", "batch", "slice", "tojson")


class ChatTemplate:
    """A template and the special tokens it may write.

    Args:
        source: Jinja.
        special_tokens: Name -> text, as in ``bos_token``.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """Write a conversation.

        Args:
            messages: Each with ``role`` and ``content``.
            add_generation_prompt: End with the opening of the assistant's turn.
            tools: Functions the model may call, as OpenAI describes them.
            options: Further variables of the template, as ``enable_thinking``.

        Returns:
            The text.

        Raises:
            ConfigError: The template refuses the messages, is not valid, or does not come to an end.
        """
        variables = {
            **options,
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with _limits():
                return _joined(self._template.generate(variables))
        except ConfigError:
            raise
        except Exception as err:  # a template is a foreign program: it can fail in any way
            raise ConfigError(f"messages: the model's chat template refuses them ({reason(err)}).") from err

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateError as err:
            raise ConfigError(f"messages: the model's chat template is not valid Jinja ({reason(err)}).") from err


def _joined(pieces: Iterator[str]) -> str:
    text, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
        text.append(piece)
    return "".join(text)


@contextmanager
def _limits() -> Generator[None]:
    """Raise in this thread, from whatever Python code is running then, when time or memory is over.

    Templates are compiled to Python, so a trace function is called at each of their lines.
    """
    deadline, most = time.monotonic() + MAX_SECONDS, _peak_bytes() + MAX_BYTES

    def check(_frame: FrameType, _event: str, _arg: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it takes more than {MAX_SECONDS:g} s")
        if _peak_bytes() > most:
            raise MemoryError(f"it takes more than {MAX_BYTES} bytes")
        return check

    before = sys.gettrace()
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """``~``, which is no operator to the sandbox."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, where no single operation can fill the memory either."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator

    def joined(self, parts: Sequence[Any]) -> str:
        """Several values as one text."""
        texts = [str(part) for part in parts]
        _refuse_large("~", texts)
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse what makes more than a conversation needs."""
        _refuse_large(operator, (left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refuse what makes more than a conversation needs; methods of text take their text as an argument."""
        method = inspect.unwrap(obj)  # jinja2 wraps `str.format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _refuse_large(method.__name__, (text, *args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what makes more than a conversation needs."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _refuse_large(function.__name__.removeprefix("do_"), (*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _refuse_large(name: str, operands: Sequence[Any]) -> None:
    numbers = [operand for operand in operands if isinstance(operand, int | float)]
    texts = [operand for operand in operands if isinstance(operand, str)]
    sizes = [len(operand) for operand in operands if isinstance(operand, str | list | tuple)]
    if (
        any(abs(number) > MAX_NUMBER for number in numbers if texts or name in _SIZED)
        or (name in ("+", "~") and sum(sizes) > MAX_CHARACTERS)
        or (name in ("*", "replace", "join") and math.prod(sizes) * max([1, *numbers]) > MAX_CHARACTERS)
        or (name in ("%", "format") and any(_WIDE.search(text) for text in texts))
    ):
        raise ValueError(f"{name} makes too much")


class _GenerationTag(Extension):
    """Accepts ``{% generation %}``, which marks the assistant's text for training, and prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 does not declare it a ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment chat templates are written for, as in transformers."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters.update({name: _bounded(function) for name, function in environment.filters.items()})
    del environment.globals["lipsum"]  # makes text without end
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _refuse_large("tojson", (indent,))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def reason(err: Exception) -> str:
    """The first line of what an exception says, or its name, without a full stop."""
    return (str(err).strip() or type(err).__name__).splitlines()[0].rstrip(".")
