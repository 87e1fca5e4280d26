"""How a quantized matrix lies in a file. This is the specification; its version is checked.

For a matrix ``NAME`` (as in ``model.layers.0.mlp.up_proj.weight``) of `[O, I]` with G groups a row:

    NAME.values   int4: uint8 [O, I/2], two codes to a byte along I, low nibble first
                  int8: int8 [O, I]
    NAME.scale    bfloat16 (or float32) [O, G]
    NAME.zero     like scale; absent when the matrix is symmetric

with ``weight[o, i] = values[o, i] * scale[o, g] + zero[o, g]``, ``g = i // (I / G)``. Everything
is read off types and shapes; nothing depends on hardware, and each backend prepacks at load.
``config.json`` carries ``quantization_config``: ``quant_method`` "llmq", ``format_version`` and
the fields of `llmq.config.QuantizationConfig`.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

from llmq.checkpoint.reader import QUANT_METHOD
from llmq.config import QuantizationConfig, Scheme, validated
from llmq.errors import ArtifactError, ConfigError
from llmq.model.names import EMBEDDING, LM_HEAD
from llmq.quant import QTensor, unpack_int4
from llmq.quant.affine import dtype_of

#: Raised when a reader of the previous version would misread a new file.
FORMAT_VERSION = 1

#: The artifact's files beside its weights and the source's own: see `record`, and the hub's index.
RECORD, INDEX = "llmq.json", "model.safetensors.index.json"

#: Field of a float checkpoint's ``config.json`` that says on which grid it was trained: as `quantization_dict`.
TRAINED = "qat_config"

VALUES, SCALE, ZERO = ".values", ".scale", ".zero"

Entry = tuple[np.dtype[Any], tuple[int, ...]]


def entry_bytes(entry: Entry) -> int:
    """Bytes of a tensor.

    Args:
        entry: Its dtype and shape.

    Returns:
        The number of bytes, without any header.
    """
    dtype, shape = entry
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def entries(name: str, shape: tuple[int, ...], scheme: Scheme) -> dict[str, Entry]:
    """What a matrix becomes in a file.

    Args:
        name: Of the matrix.
        shape: `[O, I]`.
        scheme: Its grid, with its group size settled.

    Returns:
        Stored name -> dtype and shape, in file order.
    """
    *lead, num_features = shape
    num_groups = num_features // (scheme.group_size or num_features)
    packed = scheme.num_bits == 4
    grid = (dtype_of(np, scheme.scale_dtype), (*lead, num_groups))
    stored = {
        name + VALUES: (
            np.dtype(np.uint8 if packed else np.int8),
            (*lead, num_features // 2 if packed else num_features),
        ),
        name + SCALE: grid,
    }
    if not scheme.symmetric:
        stored[name + ZERO] = grid
    return stored


def decode(name: str, stored: Mapping[str, Entry], read: Callable[[str], np.ndarray]) -> QTensor:
    """Read a matrix back.

    Args:
        name: Of the matrix; ``name + ".values"`` is stored.
        stored: Stored name -> dtype and shape, of the whole artifact.
        read: Gives a stored tensor's array.

    Returns:
        The codes, unpacked.

    Raises:
        ArtifactError: Types or shapes break the layout.
    """
    check(name, stored)
    values = read(name + VALUES)
    zero = read(name + ZERO) if name + ZERO in stored else None
    num_bits = 4 if values.dtype == np.uint8 else 8
    return QTensor(unpack_int4(values) if num_bits == 4 else values, read(name + SCALE), zero, num_bits)


def check(name: str, stored: Mapping[str, Entry]) -> tuple[int, ...]:
    """Hold a matrix's stored types and shapes against the layout.

    Args:
        name: Of the matrix.
        stored: As for `decode`.

    Returns:
        The shape of the matrix, `[O, I]`.

    Raises:
        ArtifactError: They break the layout.
    """
    if name + SCALE not in stored:
        raise ArtifactError(f"{name}: has values but no scale; the artifact is damaged.")
    dtype, shape = stored[name + VALUES]
    if dtype == np.uint8:
        shape = (*shape[:-1], 2 * shape[-1])
    elif dtype != np.int8:
        raise ArtifactError(
            f"{name}{VALUES}: is {dtype.name}, must be uint8 (int4 codes) or int8; the artifact is damaged."
        )
    grid = stored[name + SCALE]
    if grid[0] not in (dtype_of(np, "bfloat16"), np.dtype(np.float32)):
        raise ArtifactError(f"{name}{SCALE}: is {grid[0].name}, must be bfloat16 or float32; the artifact is damaged.")
    fits = len(shape) >= 2 and grid[1][:-1] == shape[:-1] and grid[1][-1] > 0 and shape[-1] % grid[1][-1] == 0
    if not fits or stored.get(name + ZERO, grid) != grid:
        raise ArtifactError(
            f"{name}: values {list(shape)} and scale {list(grid[1])} do not fit together; the artifact is damaged."
        )
    return shape


def rounds_inputs(name: str, entries: Mapping[str, Entry], config: QuantizationConfig) -> bool:
    """Whether a linear takes its inputs in int8.

    Args:
        name: Of its weight.
        entries: Stored name -> dtype and shape.
        config: Of the artifact.

    Returns:
        True where the configuration asks for it, and codes of 8 bits have one scale a row. Heads never do.
    """
    if config.activation == "none" or name + VALUES not in entries or name in (EMBEDDING, LM_HEAD):
        return False
    return entries[name + VALUES][0] == np.int8 and entries[name + SCALE][1][-1] == 1


def quantization_dict(config: QuantizationConfig) -> dict[str, Any]:
    """What ``config.json`` says of the quantization.

    Args:
        config: The configuration used.

    Returns:
        A JSON object.
    """
    made_by = {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, "llmq_version": version("llmq")}
    fields = config.model_dump(mode="json")
    if fields["activation"] == "none":  # as artifacts were written before there was a choice
        del fields["activation"]
    return {**made_by, **fields}


def read_quantization(raw: Mapping[str, Any]) -> QuantizationConfig:
    """Undo `quantization_dict`, refusing what this version cannot know.

    Args:
        raw: ``config.json``'s ``quantization_config``.

    Returns:
        The configuration.

    Raises:
        ArtifactError: The format is newer than this llmq, or the fields break a rule.
    """
    number = raw.get("format_version")
    if type(number) is not int or number < 1 or number > FORMAT_VERSION:
        made_by = raw.get("llmq_version", "of an unknown version")
        raise ArtifactError(
            f"format_version={number!r}: written by llmq {made_by}, this llmq reads up to {FORMAT_VERSION}; upgrade llmq or convert again."
        )
    try:
        return validated(QuantizationConfig, **{key: raw[key] for key in raw if key not in _MADE_BY})
    except ConfigError as err:
        raise ArtifactError(f"config.json: quantization_config: {err}") from err


_MADE_BY = ("quant_method", "format_version", "llmq_version")
