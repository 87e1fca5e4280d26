"""Reads prompts and writes answers with onnxruntime-genai: a contestant of ``decode.py``, speaking as ``decode_transformers.py``.

    python decode_genai.py MODEL THREADS

MODEL is what ``python -m onnxruntime_genai.models.builder`` wrote.
"""

import json
import sys
import time

import numpy as np
import onnxruntime_genai as og


def run(model: og.Model, prompt_len: int, gen_len: int, batch_size: int) -> tuple[float, float]:
    """Seconds of a prompt, and of all further steps; greedy."""
    params = og.GeneratorParams(model)
    length = prompt_len + gen_len
    params.set_search_options(
        max_length=length, min_length=length, batch_size=batch_size, do_sample=False, early_stopping=False
    )
    generator = og.Generator(model, params)
    tokens = np.random.default_rng(0).integers(0, 49152, (batch_size, prompt_len)).astype(np.int32)
    start = time.perf_counter()
    generator.append_tokens(tokens)
    generator.generate_next_token()
    prefilled = time.perf_counter()
    for _ in range(gen_len - 1):
        generator.generate_next_token()
    return prefilled - start, time.perf_counter() - prefilled


def main() -> None:
    """Load, then answer line by line."""
    config = og.Config(sys.argv[1])
    config.clear_providers()
    config.overlay(
        json.dumps(
            {
                "model": {
                    "decoder": {"session_options": {"intra_op_num_threads": int(sys.argv[2]), "provider_options": []}}
                }
            }
        )
    )
    model = og.Model(config)
    run(model, 16, 4, 1)
    print(json.dumps({"name": f"onnxruntime-genai {og.__version__}", "head": "as built"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, *map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
