"""What a conversion costs, as ratios measured in one run.

    python benchmarks/convert.py [--gib 1.0] [--repeats 3]

Time: `llmq convert` of a synthetic sharded bfloat16 checkpoint to int4_blockwise, over reading the
same files and upcasting each tensor to float32 once with NumPy. Memory: peak resident memory of
the converting process above that of a bare interpreter, next to four times the largest tensor in
float32 plus 200 MiB.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np

from llmq.checkpoint.reader import open_checkpoint
from llmq.checkpoint.safetensors import write_file
from llmq.model.config import ModelConfig
from llmq.model.names import expected_tensors

MIB = 1 << 20
#: Of this process image alone: ru_maxrss would include the parent's from before the exec.
PEAK = "print(next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM')))"


def write_synthetic(path: Path, gib: float) -> None:
    """A Llama of `gib` GiB of Gaussian bfloat16 weights, two layers a shard."""
    shape = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 16384,
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16", **shape,
    }  # fmt: skip

    def num_bytes() -> int:
        return sum(2 * int(np.prod(row.shape)) for row in expected_tensors(ModelConfig.from_dict(config)).values())

    while num_bytes() < gib * 2**30:
        config["num_hidden_layers"] += 1
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shards: dict[str, list[str]] = {}
    for name in expected_tensors(ModelConfig.from_dict(config)):
        layer = int(name.split(".")[2]) // 2 if ".layers." in name else 0
        shards.setdefault(f"model-{layer:05d}.safetensors", []).append(name)
    expected = expected_tensors(ModelConfig.from_dict(config))
    for file, names in shards.items():
        arrays = [
            (n, (rng.standard_normal(expected[n].shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)) for n in names
        ]
        write_file(path / file, arrays, {"format": "pt"})
    weight_map = {name: file for file, names in shards.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_and_upcast(path: Path, upcast: Callable[[np.ndarray], np.ndarray]) -> float:
    """Seconds to read every tensor and upcast it once."""
    start = time.perf_counter()
    reader = open_checkpoint(str(path))
    for name in reader.tensors:
        upcast(reader.read(name))
    return time.perf_counter() - start


#: bfloat16 to float32 by NumPy alone, and by the cast that ml_dtypes adds to it.
UPCASTS = {
    "NumPy shift": lambda a: (a.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
    "ml_dtypes cast": lambda a: a.astype(np.float32),
}


def convert(path: Path, output: Path) -> float:
    """Seconds to convert, everything included but the start of the interpreter."""
    from llmq.config import QuantizationConfig
    from llmq.convert import convert, plan_conversion

    start = time.perf_counter()
    convert(plan_conversion(str(path), QuantizationConfig(scheme="int4_blockwise")), output, force=True)
    return time.perf_counter() - start


def peak_bytes(code: str) -> int:
    """Peak resident memory of an interpreter that ran `code`."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{PEAK}"], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory, "source"), Path(directory, "artifact")
        write_synthetic(source, args.gib)
        tensors = open_checkpoint(str(source)).tensors.values()
        runs = [
            (convert(source, output), *(read_and_upcast(source, upcast) for upcast in UPCASTS.values()))
            for _ in range(args.repeats)
        ]
        ours, *bases = (min(column) for column in zip(*runs, strict=True))
        largest = 2 * max(t.num_bytes for t in tensors)
        code = (
            "from pathlib import Path\nfrom llmq.config import QuantizationConfig\nfrom llmq.convert import convert, plan_conversion\n"
            f"convert(plan_conversion({str(source)!r}, QuantizationConfig(scheme='int4_blockwise')), Path({str(output)!r}), force=True)"
        )
        peak = peak_bytes(code) - peak_bytes("")
        print(
            f"llmq {version('llmq')}, numpy {np.__version__}, python {platform.python_version()}, {platform.machine()}"
        )
        print(
            f"source {sum(t.num_bytes for t in tensors) / 2**30:.2f} GiB bfloat16 -> int4_blockwise, best of {args.repeats}"
        )
        print(f"convert                           {ours:6.2f} s")
        for name, base in zip(UPCASTS, bases, strict=True):
            print(f"read and upcast, {name:<14}   {base:6.2f} s   ratio {ours / base:.2f}")
        print(
            f"peak memory      {peak / MIB:6.0f} MiB above a bare interpreter; 4 x the largest tensor + 200 MiB = {4 * largest / MIB + 200:.0f} MiB"
        )


if __name__ == "__main__":
    main()
