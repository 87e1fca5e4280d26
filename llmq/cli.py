"""The command line: which commands there are, and how an expected error ends.

This is the only place where an `LlmqError` becomes one line on stderr and exit status 2. Commands
import their work when they run, so that ``--help`` stays quick.
"""

import io
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from llmq.commands.bench import bench
from llmq.commands.convert import convert
from llmq.commands.doctor import doctor
from llmq.commands.eval import evaluate
from llmq.commands.generate import generate
from llmq.commands.inspect import inspect
from llmq.commands.plan import plan
from llmq.commands.qat import qat
from llmq.commands.quantize import quantize
from llmq.commands.report import report
from llmq.commands.serve import serve
from llmq.errors import LlmqError


def _with_hyphens(token: str) -> str:
    """``--max_tokens`` is ``--max-tokens``."""
    return token.replace("_", "-")


app = typer.Typer(
    name="llmq",
    help="From a bfloat16 checkpoint to a quantized model that answers, on TPU or GPU, with one set of numbers all the way.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "token_normalize_func": _with_hyphens,
        "help_option_names": ["-h", "--help"],
    },
)
for command in (convert, qat, quantize, generate, serve, inspect, plan, report, doctor):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"llmq {version('llmq')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; the entry point ``llmq``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ? for it
    try:
        app()
    except LlmqError as err:
        _fail(str(err))
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as err:
        _fail(f"{err.filename or 'a file'}: cannot be used ({err.strerror or err}).")


def _fail(message: str) -> None:
    print(f"llmq: {message}", file=sys.stderr)
    sys.exit(2)
