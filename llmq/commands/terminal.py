"""What commands print: tables and progress for people on stderr, JSON on stdout."""

import json
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from llmq.checkpoint.reader import Progress as ByteProgress

#: Seconds between progress lines where there is no terminal.
_LINE_EVERY = 10.0


def console() -> Console:
    """Where people read."""
    return Console(stderr=True, soft_wrap=True)


def say(text: str) -> None:
    """Print a line for people, exactly as it is.

    Args:
        text: Without a newline at its end.
    """
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result for programs.

    Args:
        value: Something JSON can hold.
    """
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str] = ()) -> None:
    """Print a table for people.

    Args:
        columns: Headings.
        rows: Cells, as text.
        numeric: Headings of columns to align right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(stderr=True, markup=False, highlight=False, width=None if sys.stderr.isatty() else 160).print(table)


def human_bytes(num_bytes: int) -> str:
    """A size in decimal units, as disks and hubs state them.

    Args:
        num_bytes: Bytes.

    Returns:
        As in ``73.1 MB``.
    """
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


@contextmanager
def byte_progress(title: str) -> Generator[ByteProgress]:
    """Progress over bytes: a bar with time left on a terminal, plain lines elsewhere.

    Args:
        title: What is going on.

    Yields:
        The callback that `llmq.convert.convert` takes.
    """
    if not sys.stderr.isatty():
        yield _line_progress(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task(title, name="")
        yield lambda name, done, total: bar.update(task, completed=done, total=total, name=name)


@contextmanager
def count_progress() -> Generator[ByteProgress]:
    """Progress over things that are counted: a bar with time left on a terminal, plain lines elsewhere.

    Yields:
        A callback that is told what is counted, how many are done, and of how many.
    """
    if not sys.stderr.isatty():
        yield _count_lines()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        yield report


def _count_lines() -> ByteProgress:
    begun: dict[str, float] = {}
    last = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        start = begun.setdefault(what, now)
        if now - last >= _LINE_EVERY:
            last = now
            left = f", about {(now - start) * (total - done) / done:.0f} s left" if now > start and done else ""
            say(f"{done} of {total} {what}{left}")

    return report


def _line_progress(title: str) -> ByteProgress:
    last = time.monotonic()

    def report(name: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            say(f"{title}: {human_bytes(done)} of {human_bytes(total)}, at {name}")

    return report
