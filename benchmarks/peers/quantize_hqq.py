"""HQQ's own rounding of a checkpoint's linears, written back dequantized: run in an environment of its own.

    python quantize_hqq.py CHECKPOINT OUTPUT --groupsize 64

Needs torch, transformers and hqq 0.2.8, and nothing of llmq: the result is measured like any checkpoint.
"""

import argparse

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Quantize and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--groupsize", type=int, required=True)
    args, _ = parser.parse_known_args()
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    config = BaseQuantizeConfig(nbits=4, group_size=args.groupsize)
    for module in model.model.layers.modules():
        for linear in module.children():
            if isinstance(linear, torch.nn.Linear):
                packed = HQQLinear(linear, config, del_orig=False, compute_dtype=torch.bfloat16, device="cpu")
                linear.weight.data = packed.dequantize().reshape(linear.weight.shape)
    model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.checkpoint).save_pretrained(args.output)


if __name__ == "__main__":
    main()
