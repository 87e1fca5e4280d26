"""llm-compressor's GPTQ of a checkpoint's linears, written back dequantized: run in an environment of its own.

    python quantize_llmcompressor.py CHECKPOINT OUTPUT --groupsize 64 --dataset FILE --num-samples 32

Needs llmcompressor 0.14 and nothing of llmq: the result is measured like any checkpoint.
"""

import argparse
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQ_LEN = 512


def main() -> None:
    """Quantize and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("output")
    parser.add_argument("--groupsize", type=int, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    ids = tokenizer(args.dataset.read_text())["input_ids"]
    blocks = [ids[start * SEQ_LEN : (start + 1) * SEQ_LEN] for start in range(args.num_samples)]
    data = Dataset.from_dict({"input_ids": blocks, "attention_mask": [[1] * SEQ_LEN for _ in blocks]})
    grid = QuantizationArgs(
        num_bits=4, symmetric=True, strategy=QuantizationStrategy.GROUP, group_size=args.groupsize, actorder="weight"
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=grid)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=args.num_samples, max_seq_length=SEQ_LEN)
    plain = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    found = model.state_dict()
    plain.load_state_dict({name: found[name] for name in plain.state_dict()})
    plain.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
