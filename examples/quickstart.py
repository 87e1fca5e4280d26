"""From a checkpoint to an answer, in Python.

    python examples/quickstart.py MODEL OUTPUT ["a question"]

MODEL is a Hugging Face directory, a .gguf file or a hub id; OUTPUT is a directory to create.
"""

import sys
from pathlib import Path

from llmq import QuantizationConfig, SamplingParams, Session, Tokenizer, load_weights, select_backend
from llmq.backends.base import ModelOptions
from llmq.convert import convert, plan_conversion


def main(model: str, output: str, question: str = "What is the capital of France?") -> None:
    """Convert, then answer with the first backend that has an accelerator, else on the CPU."""
    plan = plan_conversion(model, QuantizationConfig(scheme="int4_blockwise"))
    record = convert(plan, Path(output))
    quantized = sum(row.scheme is not None for row in record.coverage)
    print(f"{quantized} of {len(record.coverage)} tensors quantized, weights sha256 {record.weights_sha256[:12]}")

    weights = load_weights(output)
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    params = SamplingParams(max_tokens=64)
    backend, device = select_backend("auto", None)
    opened = backend.open_model(weights, ModelOptions(device=device, max_len=len(prompt) + params.max_tokens))
    for piece in Session(opened, tokenizer).generate(prompt, params):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
