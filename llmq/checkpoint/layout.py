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
from typing import Any

import numpy as np

from llmq.checkpoint.reader import QUANT_METHOD
from llmq.config import QuantizationConfig, Scheme, validated
from llmq.errors import ArtifactError
from llmq.quant import QTensor, unpack_int4
from llmq.quant.affine import dtype_of

#: Raised when a reader of the previous version would misread a new file.
FORMAT_VERSION = 1

VALUES, SCALE, ZERO = ".values", ".scale", ".zero"

Entry = tuple[np.dtype[Any], tuple[int, ...]]


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
    fits = len(shape) >= 2 and grid[1][:-1] == shape[:-1] and grid[1][-1] > 0 and shape[-1] % grid[1][-1] == 0
    if not fits or stored.get(name + ZERO, grid) != grid:
        raise ArtifactError(
            f"{name}: values {list(shape)} and scale {list(grid[1])} do not fit together; the artifact is damaged."
        )
    return shape


def quantization_dict(config: QuantizationConfig) -> dict[str, Any]:
    """What ``config.json`` says of the quantization.

    Args:
        config: The configuration used.

    Returns:
        A JSON object.
    """
    return {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, **config.model_dump(mode="json")}


def read_quantization(raw: Mapping[str, Any], made_by: str) -> QuantizationConfig:
    """Undo `quantization_dict`, refusing what this version cannot know.

    Args:
        raw: ``config.json``'s ``quantization_config``.
        made_by: The version of llmq that wrote it, for the message.

    Returns:
        The configuration.

    Raises:
        ArtifactError: The format is newer than this llmq, or not a number.
    """
    version = raw.get("format_version")
    if not isinstance(version, int) or version < 1 or version > FORMAT_VERSION:
        raise ArtifactError(
            f"format_version={version!r}: written by llmq {made_by}, this llmq reads up to {FORMAT_VERSION}; upgrade llmq or convert again."
        )
    fields = {key: value for key, value in raw.items() if key not in ("quant_method", "format_version")}
    return validated(QuantizationConfig, **fields)
