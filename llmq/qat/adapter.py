"""A trained adapter by itself, as peft reads it, beside the checkpoint that it is merged into.

    weight[o, i]  +  lora_alpha / r * (lora_B @ lora_A)[o, i]

It lies in a directory of its own, because a model's directory that holds an adapter counts as one.
Source: huggingface/peft, ``src/peft/utils/save_and_load.py``, ``get_peft_model_state_dict``.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llmq.checkpoint import layout
from llmq.checkpoint.safetensors import encode_header
from llmq.checkpoint.writer import stage, to_json
from llmq.model.names import module_name
from llmq.qat.recipe import Lora, Recipe

#: Part of an adapter in a trainer's state -> its name there.
_PARTS = {"down": "lora_A", "up": "lora_B"}


def adapter_directory(output: Path) -> Path:
    """Where the adapter of a run goes.

    Args:
        output: Of the run.

    Returns:
        A directory beside it.
    """
    return output.with_name(f"{output.name}-adapter")


def write_adapter(
    output: Path, state: Mapping[str, np.ndarray], recipe: Recipe, lora: Lora, command: Sequence[str]
) -> None:
    """Write the adapter, completely or not at all.

    Args:
        output: Of the run.
        state: From `Trainer.state`.
        recipe: What was trained.
        lora: The part of it about adapters.
        command: The command line, for the record.

    Raises:
        OutputError: It cannot be written there.
    """
    tensors: dict[str, np.ndarray] = {}
    for key, array in state.items():
        part, _, name = key.partition(" ")
        if part in _PARTS:
            tensors[f"base_model.model.{module_name(name)}.{_PARTS[part]}.weight"] = np.ascontiguousarray(array)
    header = encode_header({name: (array.dtype, array.shape) for name, array in tensors.items()}, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": recipe.model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    with stage(adapter_directory(output), {}) as writer:
        writer.write_file("adapter_model.safetensors", header + b"".join(array.tobytes() for array in tensors.values()))
        writer.write_file("adapter_config.json", to_json(config))
        record = {
            "llmq_version": importlib.metadata.version("llmq"),
            "command": list(command),
            "recipe": recipe.model_dump(mode="json"),
            "files": dict(writer.files),
        }
        writer.write_file(layout.RECORD, to_json(record))
