"""Metrics under vLLM's names, with the prefix ``llmq:``."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmq.engine.observe import EngineStatus, RequestDone

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

#: Names with a colon end in _total only where prometheus_client adds it.
_PREFIX = "llmq:"


class Metrics:
    """Counts what the engine and the server do; an `engine.observe.Observer`.

    Args:
        model: Value of the label ``model_name``.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens evaluated or reused.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _SLOW)
        self._interval = self._histogram("time_per_output_token_seconds", "Token to token.", _FAST)
        self._latency = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _SLOW)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to slot.", _SLOW)
        self._prefill = self._histogram("request_prefill_time_seconds", "Slot to first token.", _SLOW)
        self._decode = self._histogram("request_decode_time_seconds", "First token to end.", _SLOW)
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._answer_sizes = self._histogram("request_generation_tokens", "Tokens of answers.", _TOKENS)
        self._success = Counter(
            f"{_PREFIX}request_success", "Requests ended, by reason.", ["model_name", "finished_reason"], registry=self._registry
        )  # fmt: skip
        self._http = Counter(
            f"{_PREFIX}http_requests", "Responses, by path and status.", ["path", "status"], registry=self._registry
        )
        self._unknown = Counter(
            f"{_PREFIX}unknown_fields", "Fields of bodies that nobody knows.", registry=self._registry
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(
            self._model
        )

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Report an engine's state at every scrape.

        Args:
            status: Asked each time.
        """
        self._registry.register(_EngineState(status, self._model))

    def prompt_done(self, prompt_tokens: int, cached_tokens: int, queue_seconds: float, prefill_seconds: float) -> None:
        """See `engine.observe.Observer`."""
        self._prompt_tokens.inc(prompt_tokens)
        self._prefix_queries.inc(prompt_tokens)
        self._prefix_hits.inc(cached_tokens)
        self._prompt_sizes.observe(prompt_tokens)
        self._queue.observe(queue_seconds)
        self._prefill.observe(prefill_seconds)

    def first_token(self, seconds: float) -> None:
        """See `engine.observe.Observer`."""
        self._first_token.observe(seconds)

    def token_interval(self, seconds: float) -> None:
        """See `engine.observe.Observer`."""
        self._interval.observe(seconds)

    def finished(self, done: RequestDone) -> None:
        """See `engine.observe.Observer`."""
        self._generation_tokens.inc(done.generated_tokens)
        self._answer_sizes.observe(done.generated_tokens)
        self._latency.observe(done.e2e_seconds)
        self._decode.observe(done.decode_seconds)
        self._success.labels(self._model, done.finish_reason).inc()

    def responded(self, path: str, status: int) -> None:
        """Count a response.

        Args:
            path: A route, never what a client made up.
            status: HTTP status.
        """
        self._http.labels(path, str(status)).inc()

    def unknown_fields(self, count: int) -> None:
        """Count fields that were ignored.

        Args:
            count: How many.
        """
        self._unknown.inc(count)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineState(Collector):
    """Gauges that are read when they are asked for."""

    def __init__(self, status: Callable[[], EngineStatus], model: str) -> None:
        self._status = status
        self._model = model

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        gauges = {
            "num_requests_running": ("Requests that hold slots.", status.num_running),
            "num_requests_waiting": ("Requests that wait for slots.", status.num_waiting),
            "slots_free": ("Slots that nobody holds.", status.num_free_slots),
            "kv_cache_usage_perc": (
                "Part of the cache in use, 1 is all.",
                status.num_tokens_held / max(1, status.num_tokens_capacity),
            ),
            "device_memory_bytes": ("Weights and state on the device.", status.num_bytes),
        }
        counts = {
            "compile": ("Functions compiled.", status.num_compiles),
            "engine_steps": ("Decoding steps.", status.num_steps),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in counts.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
