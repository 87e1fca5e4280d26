"""A real tokenizer."""

from pathlib import Path

import pytest

from llmq.checkpoint.gguf import GGUFCheckpoint
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Tokenizer:
    checkpoint = GGUFCheckpoint(smollm2_gguf)
    return Tokenizer.from_files(checkpoint.side_files(), ModelConfig.from_dict(checkpoint.config))
