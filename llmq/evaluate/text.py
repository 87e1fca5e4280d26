"""What is measured on a text: perplexity, and divergence from a reference and from the unquantized cache."""

from collections.abc import Callable, Iterator
from typing import Any

from llmq.backends.base import InferenceModel
from llmq.checkpoint.reader import Progress
from llmq.evaluate import kv_cache
from llmq.evaluate.baseline import BaselineFile, open_baseline, write_baseline
from llmq.evaluate.divergence import measure_divergence
from llmq.evaluate.journal import Journal
from llmq.evaluate.measured import Measured
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.perplexity import measure_perplexity
from llmq.evaluate.subject import Subject


def measure_text(
    text: str,
    subject: Subject,
    model: InferenceModel,
    reference: Subject | None,
    options: EvalOptions,
    *,
    journal: Journal,
    progress: Progress,
    tell: Callable[[str], None],
) -> Iterator[Measured]:
    """Measure a model on a text.

    Args:
        text: The text.
        subject: The model.
        model: It, open.
        reference: What to measure the divergence from; None measures only perplexity.
        options: Windows, and the reference's file.
        journal: Holds finished windows.
        progress: Told what is counted, how much is done, and of how much.
        tell: Told in a sentence what people should know.

    Yields:
        One measurement after the other.

    Raises:
        LlmqError: The text is too short, or the reference or its file does not fit.
    """
    windows: dict[str, Any] = {"window": options.window, "stride": options.stride, "max_tokens": options.max_tokens}

    def counting(what: str) -> Progress:
        return lambda _, done, total: progress(what, done, total)

    def diverging(baseline: InferenceModel | BaselineFile, what: str, group: str = "divergence") -> Measured:
        return measure_divergence(
            model, baseline, subject.tokenizer, text, group=group, journal=journal, progress=counting(what), **windows
        )

    told = counting("tokens for perplexity")
    yield measure_perplexity(model, subject.tokenizer, text, journal=journal, progress=told, **windows)
    if reference is None:
        return
    path, group = options.reference_cache, "divergence"
    if path is None:
        baseline = reference.open()
        found = diverging(baseline, "tokens for divergence")
        baseline.close()
    else:
        made_by = {"weights": reference.weights_sha256, "backend": reference.plugin.name, "dtype": model.caps.dtype}
        if not path.exists():
            baseline, told = reference.open(), counting("tokens of the reference")
            write_baseline(path, baseline, reference.tokenizer, text, made_by=made_by, progress=told, **windows)
            baseline.close()
        kept = open_baseline(path, made_by=made_by, vocab_size=model.caps.vocab_size)
        found = diverging(kept, "tokens for divergence")
    yield found
    if not subject.options.kv_int8:
        return
    if reference.weights_sha256 != subject.weights_sha256:
        plain, group = kv_cache.unquantized(subject).open(), kv_cache.GROUP
        found = diverging(plain, "tokens for the KV cache", group)
        plain.close()
        yield found
    if warning := kv_cache.warning(found, group):
        tell(warning)
