"""The engine's own time per decoding step: what the host adds to a device that is infinitely fast.

    python benchmarks/engine.py

A fake model answers in every slot; the time spent inside it is not counted.
"""

import time

from llmq.engine.engine import Engine
from llmq.engine.grammar import compile_grammar
from llmq.engine.request import Request
from llmq.engine.sampling import Grammar, SamplingParams
from tests.fake import FakeModel, byte_tokenizer, script

NUM_SLOTS = 32
NUM_TOKENS = 200

WORKLOADS = {
    "greedy": {"ignore_eos": True},
    "sampled": {"temperature": 1.0, "seed": 1},
    "four stop texts": {"stop": ("\n\n", "###", "</answer>", "User:")},
    "five logprobs": {"logprobs": 5},
    "min_tokens": {"min_tokens": NUM_TOKENS},
    "grammar": {"grammar": Grammar(kind="regex", source="[a-z ]*")},
}


def main() -> None:
    tokenizer = byte_tokenizer()
    text = tokenizer.encode("the quick brown fox jumps over the lazy dog " * 5)[1:][:NUM_TOKENS]
    for name, fields in WORKLOADS.items():
        print(f"{name:16} {milliseconds_per_step(tokenizer, text, fields):6.3f} ms a step, {NUM_SLOTS} slots")


def milliseconds_per_step(tokenizer, text: list[int], fields: dict) -> float:
    model = FakeModel(script(*text), num_slots=NUM_SLOTS, max_len=2 * NUM_TOKENS)
    engine = Engine(model, tokenizer)
    params = SamplingParams(max_tokens=NUM_TOKENS, **fields)
    for _ in range(NUM_SLOTS):
        matcher = None if params.grammar is None else compile_grammar(tokenizer, params.grammar)
        engine.submit(Request((1,), params), matcher)
    engine.step()  # admits all: a prompt of one token has nothing to prefill
    steps_before, busy_before, start = engine.status().num_steps, model.busy_seconds, time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start - (model.busy_seconds - busy_before)
    return 1e3 * seconds / (engine.status().num_steps - steps_before)


if __name__ == "__main__":
    main()
