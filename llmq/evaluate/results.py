"""The result of an evaluation: one JSON file, complete, and the same for the same input.

Nothing in it depends on when or how fast it was made. Metrics are named ``GROUP/METRIC``, as in
``hellaswag/acc_norm`` or ``perplexity/token``. Where a metric is a mean over items, `items` holds the
values it is a mean of, in order, so that two models can be compared item by item.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, ValidationError

from llmq.config import Frozen, first_error
from llmq.errors import ConfigError, OutputError

#: Raised when a reader of the previous version would misread a new file.
FORMAT_VERSION = 1


class EvaluatedModel(Frozen):
    """Which model, in which form.

    Attributes:
        name: As the user named it.
        format: ``llmq artifact``, ``huggingface`` or ``gguf``.
        weights_sha256: Of an artifact's record; for other checkpoints over the names and hashes of their weight files.
        num_bytes: Of all stored tensors.
        quantization: An artifact's configuration.
        coverage: An artifact's coverage rows, for plots of error by layer; empty for others.
        sensitivity: What its record says of what quantizing parts of it alone costs; empty where it was not measured.
    """

    name: str
    format: str
    weights_sha256: str | None
    num_bytes: Annotated[int, Field(ge=0)]
    quantization: dict[str, Any] | None
    coverage: list[dict[str, Any]] = Field(default_factory=list)
    sensitivity: dict[str, FiniteFloat] = Field(default_factory=dict)


class Metric(Frozen):
    """One number.

    Attributes:
        value: The figure.
        stderr: Its standard error; None where there is none.
        higher_is_better: Which way is up.
        link: What `value` is of the mean of its items: that mean, or its exponential.
    """

    value: FiniteFloat
    stderr: Annotated[FiniteFloat, Field(ge=0)] | None
    higher_is_better: bool
    link: Literal["identity", "exp"] = "identity"


class Results(Frozen):
    """A run.

    Attributes:
        format_version: Of this file.
        model: What was evaluated.
        backend: Name, device, compute type and kernels it ran on.
        config: Every option that can change a number.
        versions: Of llmq, the libraries, and the tasks.
        metrics: Metric name -> figure.
        items: Metric name -> what it is a mean of, one value an item. Absent for metrics that are no mean.
        item_ids: Metric name -> names of the items, in the same order.
        counts: Things to know: truncated prompts, tokens, windows, ...
        samples: Group -> per-item prompts, answers and outcomes, where they were asked for.
    """

    format_version: int = FORMAT_VERSION
    model: EvaluatedModel
    backend: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]
    metrics: dict[str, Metric]
    items: dict[str, list[FiniteFloat]] = Field(default_factory=dict)
    item_ids: dict[str, list[str]] = Field(default_factory=dict)
    counts: dict[str, int] = Field(default_factory=dict)
    samples: dict[str, list[dict[str, Any]]] = Field(default_factory=dict)


def check_writable(path: Path) -> None:
    """Refuse a place for results before hours of work, rather than after.

    Args:
        path: Where they are to go. A result file that is there will be replaced.

    Raises:
        OutputError: Its directory is missing, or another kind of file is in the way.
    """
    if not path.parent.is_dir():
        raise OutputError(f"output={path}: the directory {path.parent} does not exist; create it first.")
    if path.is_dir():
        raise OutputError(f"output={path}: is a directory; name a file in it.")
    if path.exists():
        try:
            read_results(path)
        except ConfigError as err:
            raise OutputError(
                f"output={path}: exists and is not a result of llmq eval; name another file or delete it."
            ) from err


def write_results(path: Path, results: Results) -> None:
    """Write a result file, whole or not at all.

    Args:
        path: Where.
        results: What.

    Raises:
        OutputError: It cannot be written.
    """
    staged = path.with_name(f".{path.name}.tmp")
    try:
        staged.write_text(results.model_dump_json(indent=2) + "\n", encoding="utf-8")
        staged.replace(path)
    except OSError as err:
        raise OutputError(f"output={path}: cannot be written ({err.strerror or err}).") from err


def read_results(path: Path) -> Results:
    """Read a result file.

    Args:
        path: Written by ``llmq eval``.

    Returns:
        The results.

    Raises:
        ConfigError: It is missing, damaged, or of a newer llmq.
    """
    try:
        results = Results.model_validate_json(path.read_bytes())
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read ({err.strerror or err}).") from err
    except ValidationError as err:
        raise ConfigError(f"{path}: is not a result of llmq eval ({first_error(err)}).") from err
    if results.format_version > FORMAT_VERSION:
        raise ConfigError(
            f"{path}: has format_version {results.format_version}, this llmq reads up to {FORMAT_VERSION}; upgrade llmq."
        )
    return results
