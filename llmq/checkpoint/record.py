"""``llmq.json``: where an artifact comes from, and what became of every tensor."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from llmq.checkpoint.coverage import Action
from llmq.checkpoint.layout import RECORD
from llmq.config import QuantizationConfig, Scheme, first_error
from llmq.errors import ArtifactError
from llmq.model.names import Kind


class _Part(BaseModel):
    # A record of the same format version may say more than this llmq knows.
    model_config = ConfigDict(frozen=True, extra="ignore")


class CoverageRow(_Part):
    """What became of a tensor.

    Attributes:
        name: In the source.
        kind: What it is; None when it was dropped.
        shape: Sizes.
        action: What was done.
        scheme: Its grid when it was quantized.
        reason: Why, unless it was simply quantized as configured.
        source_bytes, stored_bytes: Before and after.
        sqnr_db: Signal-to-quantization-noise ratio; None when nothing was lost or quantized.
        relative_error: Norm of the error over the norm of the weight.
        max_error_steps: Largest error, in units of the scale.
    """

    name: str
    kind: Kind | None
    shape: tuple[int, ...]
    action: Action
    scheme: Scheme | None
    reason: str
    source_bytes: int
    stored_bytes: int
    sqnr_db: float | None = None
    relative_error: float | None = None
    max_error_steps: float | None = None


class SourceFile(_Part):
    """A weight file of the source.

    Attributes:
        sha256: Of its contents.
        bytes: Its size.
    """

    sha256: str
    bytes: int


class Source(_Part):
    """What an artifact was made from.

    Attributes:
        model: As the user named it.
        format: Of the checkpoint.
        files: Its weight files, by name.
    """

    model: str
    format: str
    files: dict[str, SourceFile]


class Calibration(_Part):
    """How codes were chosen.

    Attributes:
        algorithm: As in ``--algorithm``.
        dataset: The text, as the user named it; None when none was used.
        tokens_sha256: Over the tokens of all sequences, as int32.
        num_samples, seq_len, seed: Which sequences of it.
        backend: What ran the model.
        output_errors: Weight -> error of the linear's output relative to the output.
        few_tokens: Expert -> tokens that chose it, of those that were fewer than its linears have input features, so
            that it was calibrated on others as well.
        sensitivity: Linears that share an input -> divergence of the model's predictions with them alone in
            the coarsest scheme, in nats a token; empty unless it was measured.
    """

    algorithm: str
    dataset: str | None = None
    tokens_sha256: str | None = None
    num_samples: int | None = None
    seq_len: int | None = None
    seed: int | None = None
    backend: str | None = None
    output_errors: dict[str, float] = {}
    few_tokens: dict[str, int] = {}
    sensitivity: dict[str, float] = {}


class Record(_Part):
    """The contents of ``llmq.json``.

    Attributes:
        llmq_version, format_version: Who wrote it, in which layout.
        created: UTC, ISO 8601.
        command: The command line.
        source: What it was made from.
        quantization: The configuration.
        weights_sha256: Over every stored tensor, see `writer.hash_tensor`.
        files: Every other file of the artifact -> sha256 of its contents.
        versions: Of Python and the libraries the numbers come from.
        coverage: One row per tensor of the source.
        calibration: How codes were chosen, unless by rounding alone.
    """

    llmq_version: str
    format_version: int
    created: str
    command: tuple[str, ...]
    source: Source
    quantization: QuantizationConfig
    weights_sha256: str
    files: dict[str, str]
    versions: dict[str, str]
    coverage: tuple[CoverageRow, ...]
    calibration: Calibration | None = None


def read_record(directory: Path) -> Record | None:
    """The record of an artifact.

    Args:
        directory: The artifact.

    Returns:
        The record, or None where there is none.

    Raises:
        ArtifactError: It is damaged.
    """
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        return Record.model_validate_json(path.read_bytes())
    except ValidationError as err:
        raise ArtifactError(f"{path}: is damaged ({first_error(err)}).") from err
