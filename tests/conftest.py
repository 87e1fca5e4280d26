"""Fixtures that several test modules share."""

from pathlib import Path

import pytest

SMOLLM2 = Path(__file__).parents[1] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """A real model; tests that need it skip where it was not fetched."""
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} was not fetched")
    return SMOLLM2
