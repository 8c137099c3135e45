"""What the server counts, in the form of Prometheus and as plain numbers."""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from selfspec.serving.exchange import Exchange
from selfspec.serving.model_thread import ModelThread

_RECENT = 10.0  # Seconds over which tokens a second are counted.
_FIRST_TOKEN = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # Seconds.
_GAUGES = {
    "num_waiting": ("selfspec_texts_waiting", "Texts that wait for a row."),
    "num_running": ("selfspec_texts_running", "Texts that are being written."),
    "kv_bytes": ("selfspec_kv_bytes", "What the keys and values of all rows take."),
    "kv_bytes_limit": ("selfspec_kv_bytes_limit", "What they may take."),
    "tokens_per_second": ("selfspec_tokens_per_second", "Tokens of answers that ended lately."),
    "tokens_per_step": ("selfspec_tokens_per_step", "Tokens of a text in a step."),
}


class Meters:
    """Counts requests and tokens; everything else is looked up when somebody asks."""

    def __init__(self, model: ModelThread) -> None:
        self._model = model
        self._recent: deque[tuple[float, int]] = deque()  # When tokens had come, and how many.
        self._by_status: Counts[str] = Counts()
        self._num_cancelled = 0
        self._registry = CollectorRegistry()
        own: Any = {"registry": self._registry}
        self._requests = Counter(
            "selfspec_requests", "Requests that ended.", ["route", "status"], **own
        )
        self._cancelled = Counter(
            "selfspec_requests_cancelled", "Requests whose client had gone.", **own
        )
        self._first = Histogram(
            "selfspec_time_to_first_token_seconds",
            "From a request to its first token.",
            buckets=_FIRST_TOKEN,
            **own,
        )
        self._read = Counter("selfspec_prompt_tokens", "Tokens of answered prompts.", **own)
        self._written = Counter("selfspec_new_tokens", "Tokens of answers.", **own)
        for key, (name, about) in _GAUGES.items():
            gauge = Gauge(name, about, **own)
            gauge.set_function(lambda key=key: self._numbers()[key] or 0)

    def request(self, route: str, status: int) -> None:
        """Counts a request that ended."""
        self._requests.labels(route, str(status)).inc()
        self._by_status[str(status)] += 1

    def cancelled(self) -> None:
        """Counts a request whose client had gone."""
        self._cancelled.inc()
        self._num_cancelled += 1

    def answered(self, exchange: Exchange) -> None:
        """Counts the tokens of a request that was answered."""
        self._first.observe(exchange.seconds_to_first or 0)
        usage = exchange.usage
        self._read.inc(usage["prompt_tokens"])
        self._written.inc(usage["completion_tokens"])
        self._recent.append((perf_counter(), usage["completion_tokens"]))

    def as_text(self) -> bytes:
        """What Prometheus reads."""
        return bytes(generate_latest(self._registry))

    def as_dict(self) -> dict[str, Any]:
        """The server's own numbers, beside those of `GenerationStats`."""
        return {
            "requests_by_status": dict(self._by_status),
            "num_cancelled": self._num_cancelled,
            "alone_reasons": dict(self._model.session.alone_reasons),
            **self._numbers(),
        }

    def _numbers(self) -> dict[str, Any]:
        """The value of each gauge."""
        while self._recent and self._recent[0][0] < perf_counter() - _RECENT:
            self._recent.popleft()
        session = self._model.session
        return {
            "num_waiting": self._model.num_waiting,
            "num_running": session.num_running,
            "kv_bytes": session.kv_bytes_in_use,
            "kv_bytes_limit": self._model.max_memory,
            "tokens_per_second": sum(number for _, number in self._recent) / _RECENT,
            "tokens_per_step": self._model.spec.total_stats.tokens_per_step,
        }
