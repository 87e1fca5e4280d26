"""What a run of ``llmq eval`` measures, and how: one frozen configuration."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmq.backends.base import ComputeType, KernelName
from llmq.config import Frozen


class EvalOptions(Frozen):
    """What to measure, and how.

    Attributes:
        tasks: Names of lm-eval's tasks, groups or tags.
        limit: Items of each task; None takes all.
        num_fewshot: Examples in front of each prompt; None takes each task's own number.
        apply_chat_template: Write prompts as conversations.
        log_samples: Keep every item's prompts and answers in the results.
        data_dir: Local files of the tasks, in place of the hub.
        include_path: Directory of the user's own tasks.
        batch_size: Continuations computed at once; None goes by memory.
        seed: Of whatever a task draws.
        perplexity: Text to measure perplexity on, and divergence from `reference`.
        reference: A model to measure the divergence from.
        reference_cache: File with the reference's predictions; written when it is not there.
        window: Tokens of the text seen at once.
        stride: Tokens scored per window; None cuts the text without overlap.
        max_tokens: Tokens of the text to take.
        backend, device, dtype, threads: What to run on, and with how many threads of a CPU; None measures.
        kv_cache_dtype: ``int8`` quantizes keys and values.
        kernel: Of linears with codes; None takes what the device is known to be fast with.
        max_model_len: Context in tokens; None takes the model's own, at most `subject.DEFAULT_MAX_LENGTH`.
    """

    tasks: tuple[str, ...] = ()
    limit: Annotated[int, Field(ge=1)] | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    apply_chat_template: bool = False
    log_samples: bool = False
    data_dir: Path | None = None
    include_path: Path | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 1234
    perplexity: Path | None = None
    reference: str | None = None
    reference_cache: Path | None = None
    window: Annotated[int, Field(ge=2)] = 1024
    stride: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    backend: str = "auto"
    device: str | None = None
    dtype: ComputeType | None = None
    threads: Annotated[int, Field(ge=1)] | None = None
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    kernel: KernelName | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if not self.tasks and self.perplexity is None:
            raise ValueError("tasks: are missing; name some with --tasks, or a text with --perplexity")
        if self.reference and self.perplexity is None:
            raise ValueError(f"reference={self.reference}: is compared on a text; name one with --perplexity")
        if self.reference_cache and self.reference is None:
            raise ValueError(f"reference_cache={self.reference_cache}: needs --reference, whose predictions it holds")
        for name in ("data_dir", "include_path"):
            path = getattr(self, name)
            if path is not None and not path.is_dir():
                raise ValueError(f"{name}={path}: must be an existing directory")
        return self
