"""llm-compressor's W4A16 of a checkpoint, rounded without data and packed as vLLM reads it: for ``serving.py``.

    python checkpoint_w4a16.py CHECKPOINT OUTPUT [--groupsize 64]

Needs llmcompressor 0.14 and nothing of llmq. Linears get symmetric int4 codes, the head stays as it is.
"""

import argparse
import json
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Quantize and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--groupsize", type=int, default=64)
    args = parser.parse_args()
    grid = QuantizationArgs(num_bits=4, symmetric=True, strategy=QuantizationStrategy.GROUP, group_size=args.groupsize)
    scheme = QuantizationScheme(targets=["Linear"], weights=grid)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    oneshot(model=model, recipe=QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    model.save_pretrained(args.output, save_compressed=True)
    AutoTokenizer.from_pretrained(args.checkpoint).save_pretrained(args.output)
    written = Path(args.output) / "config.json"  # has lost rope_theta: the checkpoint's own, with what describes codes
    quantization = json.loads(written.read_text())["quantization_config"]
    own = json.loads((Path(args.checkpoint) / "config.json").read_text())
    written.write_text(json.dumps({**own, "quantization_config": quantization}, indent=2))


if __name__ == "__main__":
    main()
