"""``llmq report``: runs side by side, and which differences are more than noise."""

from pathlib import Path
from typing import Annotated

import typer

from llmq.errors import ConfigError, OutputError

_NAMES = "its place from 1, its model's name, or its file's"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Result files of llmq eval --output; beside them, directories or logs of llmq qat.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A .md or .html file. Default: Markdown on standard output.", show_default=False)] = None,
    baseline: Annotated[str | None, typer.Option("--baseline", help=f"The run to hold the others against: {_NAMES}. Default: the first.", show_default=False)] = None,
    ptq: Annotated[str | None, typer.Option("--ptq", help="With --qat, the baseline quantized without training; shows the share of its loss that training recovered.", show_default=False)] = None,
    qat: Annotated[str | None, typer.Option("--qat", help="With --ptq, the run quantized with training.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:  # fmt: skip
    """Compare results of eval: errors, paired differences, and a verdict for every metric."""
    if output is not None and output.suffix not in (".md", ".html"):
        raise ConfigError(f"output={output}: must end in .md or .html.")
    if output is not None and output.exists() and not force:
        raise OutputError(f"output={output}: exists already; choose another file or add --force to replace it.")
    from llmq.commands.terminal import say
    from llmq.evaluate.report import build_report
    from llmq.evaluate.report_html import to_html
    from llmq.evaluate.report_markdown import to_markdown
    from llmq.evaluate.results import read_results
    from llmq.evaluate.training import is_training, read_training

    results = [(path, read_results(path)) for path in runs if not is_training(path)]
    trainings = [read_training(path) for path in runs if is_training(path)]
    found = build_report(results, baseline=baseline, ptq=ptq, qat=qat, trainings=trainings)
    if output is None:
        print(to_markdown(found), end="")
        return
    text = to_html(found) if output.suffix == ".html" else to_markdown(found)
    staged = output.with_name(f".{output.name}.partial")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(output)
    except OSError as err:
        staged.unlink(missing_ok=True)
        raise OutputError(f"output={output}: cannot be written ({err.strerror or err}).") from err
    say(f"report of {len(runs)} runs in {output}")
