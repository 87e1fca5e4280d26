"""A model as a bf16 checkpoint that other libraries load: what peers are measured on.

    python -m benchmarks.twin MODEL DIR

MODEL is anything llmq opens; quantized tensors are dequantized.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from llmq.backends.reference import reference_weight
from llmq.checkpoint.loader import load_weights


def write_twin(model: str, directory: Path) -> None:
    """Write the weights in bf16, with the configuration and the tokenizer's files.

    Args:
        model: Anything llmq opens.
        directory: Is created.
    """
    weights = load_weights(model)
    directory.mkdir(parents=True, exist_ok=True)
    for name, contents in weights.reader.side_files().items():
        (directory / name).write_bytes(contents)
    config = {**weights.reader.config, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: torch.from_numpy(reference_weight(weights[name]).astype(np.float32)) for name in weights}
    save_file({name: t.bfloat16() for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    write_twin(sys.argv[1], Path(sys.argv[2]))
