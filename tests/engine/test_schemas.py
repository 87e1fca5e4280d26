"""Random JSON schemas: whatever an answer that comes to its end says, it matches."""

import json
import random
from typing import Any

import jsonschema
import numpy as np

from llmq.engine.engine import Engine
from llmq.engine.grammar import compile_grammar
from llmq.engine.request import Delta, Request
from llmq.engine.sampling import Grammar, SamplingParams
from tests.fake import FakeModel, byte_tokenizer

NUM_SCHEMAS = 200


def value(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema of moderate size."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "const"]
    kind = rng.choice([*kinds, "object", "object", "array", "array", "anyOf"] if depth else kinds)
    low = rng.randint(-50, 50)
    match kind:
        case "object":
            names = rng.sample(["name", "age", "tags", "the place", "ünï", "x", "y"], rng.randint(0, 4))
            properties = {name: value(rng, depth - 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = rng.randint(0, 2)
            return {"type": "array", "items": value(rng, depth - 1), "minItems": least, "maxItems": least + 2}
        case "anyOf":
            return {"anyOf": [value(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "enum":
            return {"enum": rng.sample(["a", "b c", 1, 2.5, None, True, "ü"], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["only", 7, False, {"a": [1]}])}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(yes|no)$", "^\\d{3}-\\d{4}$"])}
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)}
    return {"type": kind}


def with_reference(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    point = {"type": "object", "properties": {"at": value(rng, 0)}, "required": ["at"], "additionalProperties": False}
    properties = {"first": {"$ref": "#/$defs/p"}, "second": {"$ref": "#/$defs/p"}, "rest": schema}
    return {
        "$defs": {"p": point},
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def test_completed_answers_match() -> None:
    rng = random.Random(5)
    schemas = [value(rng, 3) for _ in range(NUM_SCHEMAS)]
    schemas = [with_reference(rng, schema) if i % 5 == 0 else schema for i, schema in enumerate(schemas)]
    tokenizer = byte_tokenizer()
    noise = np.random.default_rng(0)
    model = FakeModel(lambda _prompt, _answer: noise.normal(size=320), num_slots=8, max_len=1024)
    engine = Engine(model, tokenizer)
    texts, ends = dict.fromkeys(range(NUM_SCHEMAS), ""), {}
    for i, schema in enumerate(schemas):
        grammar = Grammar(kind="json_schema", source=json.dumps(schema))
        request = Request((1, 5), SamplingParams(max_tokens=1000, temperature=1, seed=i, grammar=grammar), id=str(i))
        engine.check(request)
        engine.submit(request, compile_grammar(tokenizer, grammar))
    while engine.has_work:
        for ident, event in engine.step():
            if isinstance(event, Delta):
                texts[int(ident)] += event.text
                ends[int(ident)] = event.finish_reason
    finished = [i for i in range(NUM_SCHEMAS) if ends[i] == "stop"]
    assert {*ends.values()} <= {"stop", "length"}
    assert len(finished) > 0.95 * NUM_SCHEMAS
    for i in finished:
        jsonschema.validate(json.loads(texts[i]), schemas[i])
