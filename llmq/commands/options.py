"""Options that several commands share: one name, one help text, one meaning."""

from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from llmq.config import SCHEMES, SYNONYMS, Override

_SCHEMES = ", ".join(SCHEMES)
_SYNONYMS = ", ".join(f"{short} = {name}" for short, name in SYNONYMS.items())

Model = Annotated[
    str,
    typer.Argument(help="A model's directory, a .gguf file, or a hub id like organization/name.", show_default=False),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Directory to create. Default: the model's name and the scheme, here.",
        show_default=False,
    ),
]
SchemeName = Annotated[str, typer.Option("--scheme", help=f"One of {_SCHEMES} ({_SYNONYMS}).")]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--groupsize", "--group-size",
        help="Input features that share a scale, for blockwise schemes. Default: per layer, the largest of 128, 64, 32 that divides.",
        show_default=False,
    ),
]  # fmt: skip
GroupSizeFallback = Annotated[
    bool, typer.Option("--groupsize-fallback", help="Let layers that --groupsize does not divide choose as without it.")
]
Symmetric = Annotated[
    bool | None,
    typer.Option(
        "--sym/--asym",
        help="Whether code 0 stands for weight 0. Default: asymmetric for int4, symmetric for int8.",
        show_default=False,
    ),
]
EmbeddingScheme = Annotated[str, typer.Option("--embedding", help="Scheme of the token embedding, or none to keep it.")]
HeadScheme = Annotated[
    str,
    typer.Option("--lm-head", help="Scheme of an untied head, or none to keep it. A tied head follows --embedding."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        help="Keep the modules this glob matches, or regular expression after re:. Repeatable.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        help="PATTERN=SCHEME or PATTERN=SCHEME:GROUPSIZE for single modules; the last match wins. Repeatable.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and its size, write nothing.")]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if a tensor would not be quantized as asked.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
BackendName = Annotated[str, typer.Option("--backend", help="tpu (JAX), gpu (torch), cpu (torch on the CPU), or auto.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device of the backend, as cpu, cuda or tpu. Default: its accelerator, else the CPU.",
        show_default=False,
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Compute type: bfloat16 or float32. Default: what the device is good at.", show_default=False
    ),
]
KvCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="auto keeps keys and values in the compute type, int8 quantizes them.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Threads on a CPU. Default: chosen by measuring.", min=1, show_default=False),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Context in tokens. Default: what the prompts need.", show_default=False),
]

#: Option -> field of `QuantizationConfig`.
_FIELDS = MappingProxyType(
    {
        "scheme": "scheme",
        "groupsize": "group_size",
        "groupsize_fallback": "groupsize_fallback",
        "sym": "symmetric",
        "embedding": "embedding",
        "lm_head": "lm_head",
        "ignore": "ignore",
        "override": "overrides",
    }
)


def named_fields(ctx: typer.Context) -> dict[str, Any]:
    """What the user said of the quantization.

    Args:
        ctx: Of a command that has these options.

    Returns:
        Fields of `QuantizationConfig`; those left at their defaults are not there.
    """
    given = {
        field: ctx.params[option]
        for option, field in _FIELDS.items()
        if (source := ctx.get_parameter_source(option)) and source.name == "COMMANDLINE"
    }
    if "overrides" in given:
        given["overrides"] = tuple(Override.parse(text) for text in given["overrides"])
    return given
