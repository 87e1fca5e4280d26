"""Tiny data files in the fields of the hub's datasets, and a tiny model to answer them."""

import json
from pathlib import Path
from typing import Any

from tests.tiny import byte_tokenizer_files, write_tiny

HELLASWAG = [
    {
        "ind": i,
        "activity_label": "Making tea",
        "ctx_a": f"A person fills kettle number {i}.",
        "ctx_b": "then",
        "ctx": "",
        "endings": [f"pours water {i}.", "sleeps.", f"drinks {i} cups.", "leaves the room."],
        "label": str(i % 4),
    }
    for i in range(8)
]
ARC = [
    {
        "id": f"q{i}",
        "question": f"How much is {i} and one?",
        "choices": {"text": [str(i), str(i + 1), "none"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
    for i in range(6)
]
TRUTHFULQA = [
    {
        "question": f"Is it {i} o'clock?",
        "mc1_targets": {"choices": ["Yes.", "No."], "labels": [1, 0]},
        "mc2_targets": {"choices": ["Yes.", "It is.", "No."], "labels": [1, 1, 0]},
    }
    for i in range(4)
]
PAGES = [{"page": " = Tea = \n\n Tea is a drink . \n"}, {"page": " = Water = \n\n Water is wet , they say . \n"}]
FILES = {
    "hellaswag_validation.jsonl": HELLASWAG,
    "arc_easy_test.jsonl": ARC,
    "truthfulqa_mc_validation.jsonl": TRUTHFULQA,
    "wikitext2_test_pages.jsonl": PAGES,
}


def write_local_data(path: Path) -> Path:
    """A directory for ``--data-dir``."""
    path.mkdir()
    for name, rows in FILES.items():
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tiny_model(path: Path, **changes: Any) -> Path:
    """A tiny random model with a tokenizer of bytes, a BOS and a chat template."""
    model = write_tiny(path, num_hidden_layers=1, hidden_size=64, **changes)
    for name, contents in byte_tokenizer_files().items():
        (model / name).write_bytes(contents)
    return model
