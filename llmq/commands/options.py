"""Options that several commands share: one name, one help text, one meaning."""

from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from llmq.config import SCHEMES, SYNONYMS, Override
from llmq.errors import ConfigError

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
Activation = Annotated[
    str,
    typer.Option(
        "--activation",
        help="int8 rounds the inputs of int8_per_channel linears as well, one scale a token; none does not.",
    ),
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
        "--dtype",
        help="Compute type: bfloat16 or float32, to run a model on torch also float16. Default: what the device is good at.",
        show_default=False,
    ),
]
KvCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="auto keeps keys and values in the compute type, int8 quantizes them.")
]
Kernel = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        help="pallas: our own kernel for int4 and int8 linears on a TPU, which no chip has run yet. Default: what is known to be fast.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Threads on a CPU. Default: chosen by measuring.", min=1, show_default=False),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the decode step with torch.compile: faster steps, a slower start. Programs are kept for the next run.",
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        help="Layout of several devices: dp groups of slots, each of tp devices, of which sp share the positions of "
        "long contexts, as tp=4,dp=2. Default: one device.",
        show_default=False,
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option("--tp", help="Devices that compute each layer together; short for --mesh tp=N.", show_default=False),
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
        "activation": "activation",
    }
)


def read_mesh(mesh: str | None, tp: int | None) -> dict[str, int]:
    """The layout of devices.

    Args:
        mesh: As in ``tp=4,dp=2``.
        tp: As in ``--tp``.

    Returns:
        Fields `dp`, `tp` and `sp` of `llmq.backends.base.ModelOptions`.

    Raises:
        ConfigError: It names another axis, or one twice, or a size that is none.
    """
    parts = [part.strip() for part in (mesh or "").split(",") if part.strip()] + [f"tp={tp}"] * (tp is not None)
    sizes = {axis: size for axis, _, size in (part.partition("=") for part in parts)}
    if len(sizes) < len(parts) or not sizes.keys() <= {"dp", "tp", "sp"} or not all(map(_is_count, sizes.values())):
        raise ConfigError(
            f"mesh={','.join(parts)!r}: must name dp, tp and sp at most once each, with sizes from 1 on, as in tp=4,dp=2."
        )
    return {"dp": 1, "tp": 1, "sp": 1} | {axis: int(size) for axis, size in sizes.items()}


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


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
