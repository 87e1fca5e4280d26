"""Reads prompts and writes answers with transformers, in bfloat16 or with torchao's int4: a contestant of ``decode.py``.

    python decode_transformers.py CHECKPOINT THREADS [--int4 GROUPSIZE] [--cpu]

For every line ``PROMPT_LEN GEN_LEN BATCH_SIZE`` on standard input it prints the seconds of the prompt and of the
steps after it; with --cpu, CPU seconds. Needs torch and transformers, for int4 torchao, and nothing of llmq.
"""

import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers import __version__ as version

CLOCK = time.process_time if "--cpu" in sys.argv else time.perf_counter


@torch.inference_mode()
def run(model: torch.nn.Module, prompt_len: int, gen_len: int, batch_size: int) -> tuple[float, float]:
    """Seconds of a prompt, and of all further steps; greedy."""
    tokens = torch.randint(0, model.config.vocab_size, (batch_size, prompt_len), generator=torch.manual_seed(0))
    cache, start = DynamicCache(config=model.config), CLOCK()

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    tokens, prefilled = step(tokens), CLOCK()
    for _ in range(gen_len - 1):
        tokens = step(tokens)
    return prefilled - start, CLOCK() - prefilled


def main() -> None:
    """Load, then answer line by line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("threads", type=int)
    parser.add_argument("--int4", type=int)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16).eval()
    name, head = f"transformers {version}, torch {torch.__version__}", "bf16"
    if args.int4:
        from torchao import __version__ as torchao_version
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=args.int4))
        name += f", torchao {torchao_version}"
        head = type(model.lm_head.weight).__name__ if type(model.lm_head.weight) is not torch.nn.Parameter else "bf16"
    run(model, 16, 4, 1)
    print(json.dumps({"name": name, "head": head}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, *map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
