"""What a load test found, as numbers: rates, percentiles, errors by kind, and the client's own share."""

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmq.serve.load import Load
from llmq.serve.load_client import Outcome

_PERCENTILES = (50, 90, 99)

#: Libraries that carry the load.
_LIBRARIES = ("llmq", "httpx", "orjson")


def summarize(load: Load) -> dict[str, Any]:
    """Everything there is to say of a run.

    Args:
        load: What it measured.

    Returns:
        JSON; ``latency`` and ``client.send_delay`` in seconds, None where nothing was measured.
    """
    complete = [outcome for outcome in load.outcomes if outcome.error is None]
    num_output = sum(outcome.output_tokens for outcome in complete)
    return {
        "config": load.options.model_dump(mode="json"),
        "arrivals": load.options.arrivals,
        "server": dict(load.server),
        "client": {
            "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in _LIBRARIES}},
            "machine": platform.machine(),
            "num_cpus": os.cpu_count(),
            "cpu_share": load.cpu_seconds / load.seconds if load.seconds else None,
            "send_delay": _distribution([outcome.sent - outcome.scheduled for outcome in load.outcomes]),
        },
        "seconds": load.seconds,
        "num_requests": len(load.outcomes) + load.num_cut,
        "num_complete": len(complete),
        "num_cut": load.num_cut,
        "errors": dict(Counter(outcome.error for outcome in load.outcomes if outcome.error is not None)),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in complete),
        "output_tokens": num_output,
        "requests_per_second": len(complete) / load.seconds if load.seconds else None,
        "output_tokens_per_second": num_output / load.seconds if load.seconds else None,
        "latency": latencies(complete),
    }


def latencies(complete: Sequence[Outcome]) -> dict[str, Mapping[str, float] | None]:
    """How long answers took.

    Args:
        complete: Requests that were answered.

    Returns:
        Distributions in seconds: ``first_token`` and ``end_to_end`` since the request was due,
        ``inter_token`` between parts of an answer that arrived one after the other, ``per_output_token``
        the mean of an answer after its first token.
    """
    return {
        "first_token": _distribution([o.arrivals[0] - o.scheduled for o in complete if o.arrivals]),
        "inter_token": _distribution([gap for o in complete for gap in np.diff(o.arrivals)]),
        "per_output_token": _distribution(
            [
                (o.arrivals[-1] - o.arrivals[0]) / (o.output_tokens - 1)
                for o in complete
                if o.arrivals and o.output_tokens > 1
            ]
        ),
        "end_to_end": _distribution([o.ended - o.scheduled for o in complete]),
    }


def _distribution(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = np.percentile(values, _PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(_PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}
