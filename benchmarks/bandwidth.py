"""How near decoding comes to the memory's bandwidth, on a model of Llama-3.2-1B's shapes with random weights.

    python -m benchmarks.bandwidth [--work DIR] [--layers 16] [--threads N]

Writes a checkpoint of random bfloat16 weights, converts it with ``llmq convert`` to int4 in groups of 128, decodes one
sequence, and measures in the same process what one sweep over memory takes: no step can be shorter than reading
the weights that it multiplies once.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file

from llmq.backends import speed
from llmq.backends.base import ModelOptions
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import load_weights
from llmq.model.config import ModelConfig
from llmq.model.names import EMBEDDING, Kind, expected_tensors

#: As published, but for the number of layers.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def write_checkpoint(directory: Path, num_layers: int) -> None:
    """Random weights, in one file."""
    config = CONFIG | {"num_hidden_layers": num_layers}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(0), {}
    for name, row in expected_tensors(ModelConfig.from_dict(config)).items():
        if row.kind is Kind.NORM:
            array = np.ones(row.shape, ml_dtypes.bfloat16)
        else:
            array = (0.02 * rng.standard_normal(row.shape, np.float32)).astype(ml_dtypes.bfloat16)
        tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp())
    source, int4 = work / f"random-{args.layers}", work / f"int4-{args.layers}"
    if not int4.exists():
        write_checkpoint(source, args.layers)
        convert = ("convert", source, "--scheme", "int4_blockwise", "--groupsize", "128", "-o", int4)
        subprocess.run([sys.executable, "-m", "llmq", *map(str, convert)], check=True, stderr=subprocess.DEVNULL)
    weights = load_weights(str(int4))
    options = ModelOptions(device="cpu", max_len=128, num_threads=args.threads)
    model = load_backend("gpu").open_model(weights, options)
    state, steps, bandwidths = model.warmup(model.init_state()), [], []
    for _ in range(5):  # in turns: whatever else the machine does falls on both
        bandwidths.append(speed.memory_bandwidth())
        state, (_, _, seconds) = speed.run_once(model, state, 1, 16, 17)
        steps.append(seconds / 16)
    read = weights.num_bytes
    assert EMBEDDING in weights.shapes, "tied: the table is the head, which a step reads whole"
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, llmq {version('llmq')}"
    )
    print("\n".join(model.caps.kernels))
    bounds = [read / bandwidth for bandwidth in bandwidths]
    ratios = [step / bound for step, bound in zip(steps, bounds, strict=True)]
    print(
        f"{read / 1e6:.0f} MB of weights at {statistics.median(bandwidths) / 1e9:.1f} GB/s: {1e3 * statistics.median(bounds):.1f} ms"
    )
    print(
        f"a step takes {1e3 * statistics.median(steps):.1f} ms: {statistics.median(ratios):.2f} times the bound, "
        f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    )


if __name__ == "__main__":
    main()
