"""A run of ``llmq eval``: a model, what to measure on it, and the result file."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmq.backends.base import InferenceModel
from llmq.checkpoint.reader import Progress, no_progress
from llmq.errors import ConfigError
from llmq.evaluate.baseline import TOP_K
from llmq.evaluate.journal import Journal
from llmq.evaluate.measured import Measured
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.packs import Limits, tokens_per_call
from llmq.evaluate.results import Results, check_writable, write_results
from llmq.evaluate.subject import Subject, files_sha256, find_subject
from llmq.evaluate.text import measure_text
from llmq.evaluate.windows import read_text

if TYPE_CHECKING:
    from llmq.evaluate.tasks import LoadedTasks, TaskResults

#: Libraries whose version can change a number.
_LIBRARIES = ("llmq", "numpy", "tokenizers", "jinja2")
_TASK_LIBRARIES = ("lm-eval", "datasets")

#: Texts generated at once, unless the user names a number.
_NUM_SLOTS = 8


def evaluate(
    model: str,
    options: EvalOptions,
    *,
    output: Path | None = None,
    resume: bool = False,
    progress: Progress = no_progress,
    tell: Callable[[str], None] = lambda _: None,
) -> Results:
    """Measure a model.

    Args:
        model: An artifact, a checkpoint, or a hub id of either.
        options: What to measure, and how.
        output: File for the results. While the run lasts, finished answers are kept beside it.
        resume: Go on from the answers that an interrupted run kept.
        progress: Told what is counted, how much is done, and of how much.
        tell: Told in a sentence what people should know.

    Returns:
        The results, the same for the same input.

    Raises:
        LlmqError: An option, the model, a task or its data cannot be used.
    """
    if output is not None:
        check_writable(output)
    elif resume:
        raise ConfigError("resume: needs --output, beside which an interrupted run keeps its answers.")
    subject = _subject(model, options, kv_int8=options.kv_cache_dtype == "int8")
    reference = _subject(options.reference, options) if options.reference else None
    if options.apply_chat_template and not subject.tokenizer.has_chat_template:
        raise ConfigError("apply_chat_template: the model has no chat template; leave it out.")
    if options.perplexity and options.window > subject.options.max_len:
        raise ConfigError(f"window={options.window}: must be at most the context, {subject.options.max_len}.")
    text = None if options.perplexity is None else read_text(options.perplexity)
    tokens = tokens_per_call(subject.weights.config.vocab_size, subject.plugin.memory(subject.options.device).total)
    limits = Limits(tokens, options.batch_size)
    with ExitStack() as stack:
        tasks = stack.enter_context(_load(options)) if options.tasks else None
        evaluated = subject.describe()
        config = _config(options, subject, reference, text) | {"tokens_per_call": tokens}
        versions = _versions(options, subject.plugin.framework)
        run = {"model": evaluated.weights_sha256, "device": subject.options.device, "dtype": options.dtype}
        run["kernel"] = options.kernel
        path = output and output.with_name(output.name + ".journal")
        journal = stack.enter_context(closing(Journal(path, {**run, **config, **versions}, resume=resume)))
        if len(journal):
            tell(f"resuming: {len(journal)} answers are there already")
        for note in tasks.notes if tasks else ():
            tell(note)
        opened = subject.open(num_slots=(options.batch_size or _NUM_SLOTS) if tasks and tasks.generates else 1)
        if not subject.plugin.has_accelerator():
            tell(f"backend {subject.plugin.name} on {opened.caps.device}, {opened.caps.dtype}")
        parts: list[Measured] = []
        found = None
        if tasks:
            found, measured = _run_tasks(tasks, subject, opened, limits, journal, progress)
            parts.append(measured)
            config["num_fewshot"] = found.num_fewshot
            versions |= found.versions
        if text is not None:
            parts += measure_text(
                text, subject, opened, reference, options, journal=journal, progress=progress, tell=tell
            )
        results = Results(
            model=evaluated,
            backend=_backend(subject.plugin.name, opened),
            config=config,
            versions=versions,
            samples=found.samples if found and options.log_samples else {},
            **_joined(parts),
        )
    if output is not None:
        write_results(output, results)
    journal.remove()
    return results


def _subject(model: str, options: EvalOptions, kv_int8: bool = False) -> Subject:
    return find_subject(
        model,
        backend=options.backend,
        device=options.device,
        max_length=options.max_model_len,
        dtype=options.dtype,
        kv_int8=kv_int8,
        num_threads=options.threads,
        kernel=options.kernel,
    )


def _load(options: EvalOptions) -> AbstractContextManager["LoadedTasks"]:
    from llmq.evaluate.tasks import load_tasks

    return load_tasks(options)


def _run_tasks(
    tasks: "LoadedTasks",
    subject: Subject,
    model: InferenceModel,
    limits: Limits,
    journal: Journal,
    progress: Progress,
) -> tuple["TaskResults", Measured]:
    from llmq.evaluate.adapter import Adapter, prefix_token

    prefix = prefix_token(subject.tokenizer, subject.weights.config)
    seed = tasks.options.seed
    adapter = Adapter(model, subject.tokenizer, prefix, limits=limits, seed=seed, journal=journal, progress=progress)
    found = tasks.run(adapter)
    counts = {"tasks/requests": adapter.num_requests, "tasks/truncated_prompts": adapter.num_truncated}
    return found, Measured(found.metrics, found.items, found.item_ids, counts)


def _config(options: EvalOptions, subject: Subject, reference: Subject | None, text: str | None) -> dict[str, Any]:
    """The options that can change a number; of files, what they hold and not where they are."""
    config: dict[str, Any] = {
        "backend": subject.plugin.name,
        "max_length": subject.options.max_len,
        "kv_cache_dtype": options.kv_cache_dtype,
    }
    if options.tasks:
        from llmq.evaluate.tasks import data_files

        named = ("tasks", "limit", "num_fewshot", "apply_chat_template", "batch_size", "seed")
        config |= options.model_dump(mode="json", include={*named})
        config["data_sha256"] = data_files(options.tasks, options.data_dir)
        config["include_sha256"] = files_sha256(_task_files(options.include_path))
    if text is not None:
        config |= options.model_dump(mode="json", include={"window", "stride", "max_tokens"})
        config["text_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    if reference is not None:
        config |= {"reference": options.reference, "reference_sha256": reference.weights_sha256}
        config["reference_top_k"] = TOP_K if options.reference_cache else None
    return config


def _versions(options: EvalOptions, framework: str) -> dict[str, str]:
    libraries = (*_LIBRARIES, framework, *(_TASK_LIBRARIES if options.tasks else ()))
    found = {library: importlib.metadata.version(library) for library in sorted({*libraries})}
    return {"python": platform.python_version(), **found}


def _backend(name: str, model: InferenceModel) -> dict[str, Any]:
    caps = model.caps
    return {"name": name, "device": caps.device, "dtype": caps.dtype, "kernels": list(caps.kernels)}


def _joined(parts: list[Measured]) -> dict[str, Any]:
    return {
        field: {key: value for part in parts for key, value in getattr(part, field).items()}
        for field in Measured._fields
    }


def _task_files(directory: Path | None) -> dict[str, Path]:
    """The definitions of the user's own tasks, by their path in the directory."""
    found = sorted(path for path in directory.rglob("*") if path.suffix in (".yaml", ".py")) if directory else []
    return {str(path.relative_to(directory or path)): path for path in found}
