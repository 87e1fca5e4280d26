"""``llmq inspect``: what is in a model's directory, and whether it is whole."""

from typing import Annotated, Any

import typer

from llmq.commands import options


def inspect(
    model: options.Model,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and check every rule of the layout.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show what a checkpoint or artifact holds: sizes, configuration, coverage, provenance."""
    from llmq.checkpoint.inspect import describe
    from llmq.commands.convert import print_coverage, summary
    from llmq.commands.terminal import byte_progress, human_bytes, print_json, say

    with byte_progress("verifying") as progress:
        found = describe(model, verify=verify, progress=progress)
    print_coverage(found["coverage"])
    for key, value in _facts(found).items():
        say(f"{key:<13} {value}")
    if found["quantization"]:
        say(summary(found["coverage"]))
    say(
        f"total         {human_bytes(found['num_bytes'])} in {len(found['files'])} weight files"
        + (", every byte verified" if verify else "")
    )
    if as_json:
        print_json(found)


def _facts(found: dict[str, Any]) -> dict[str, str]:
    facts = {"model": found["path"], "format": found["format"], "architecture": found["architecture"]}
    if found["quantization"]:
        facts["quantization"] = ", ".join(
            f"{k}={v}" for k, v in found["quantization"].items() if v not in (None, [], False)
        )
    record = found["record"]
    if record:
        facts["made from"] = f"{record['source']['model']} by llmq {record['llmq_version']} on {record['created']}"
        facts["command"] = " ".join(record["command"])
        facts["weights"] = f"sha256 {record['weights_sha256']}"
    return facts
