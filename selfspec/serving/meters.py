"""What the server counts, in the form of Prometheus and as plain numbers."""

from __future__ import annotations

from collections import Counter as Counts
from collections import deque
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from selfspec.serving.answering import Answering

_RECENT = 10.0  # Seconds over which tokens a second are counted.
_FIRST_TOKEN = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # Seconds.


class Meters:
    """Counts requests and tokens; everything else is looked up when somebody asks."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._recent: deque[tuple[float, int]] = deque()  # When tokens had come, and how many.
        self._by_status: Counts[str] = Counts()
        self.num_cancelled = 0
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
        self._add_gauges(own)

    def _add_gauges(self, own: Any) -> None:
        looked_up = {
            "selfspec_texts_waiting": ("Texts that wait for a row.", "num_waiting"),
            "selfspec_texts_running": ("Texts that are being written.", "num_running"),
            "selfspec_kv_bytes": ("What the keys and values of all rows take.", "kv_bytes"),
            "selfspec_kv_bytes_limit": ("What they may take.", "max_memory"),
        }
        for name, (about, attribute) in looked_up.items():
            gauge = Gauge(name, about, **own)
            gauge.set_function(lambda each=attribute: getattr(self._answering, each) or 0)
        Gauge(
            "selfspec_tokens_per_step", "Tokens of a text in a step, since the start.", **own
        ).set_function(lambda: self._answering.spec.total_stats.tokens_per_step)
        Gauge(
            "selfspec_tokens_per_second", "Tokens of answers that ended lately.", **own
        ).set_function(lambda: self.tokens_per_second)

    def request(self, route: str, status: int) -> None:
        """Counts a request that ended."""
        self._requests.labels(route, str(status)).inc()
        self._by_status[str(status)] += 1

    def cancelled(self) -> None:
        """Counts a request whose client had gone."""
        self._cancelled.inc()
        self.num_cancelled += 1

    def first_token(self, seconds: float) -> None:
        """Counts how long a request waited for its first token."""
        self._first.observe(seconds)

    def answered(self, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Counts the tokens of a request that was answered."""
        self._read.inc(num_prompt_tokens)
        self._written.inc(num_new_tokens)
        self._recent.append((perf_counter(), num_new_tokens))

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answers that ended in the last ten seconds."""
        while self._recent and self._recent[0][0] < perf_counter() - _RECENT:
            self._recent.popleft()
        return sum(number for _, number in self._recent) / _RECENT

    def as_text(self) -> bytes:
        """What Prometheus reads."""
        return bytes(generate_latest(self._registry))

    def as_dict(self) -> dict[str, Any]:
        """The server's own numbers, beside those of `GenerationStats`."""
        answering = self._answering
        return {
            "requests_by_status": dict(self._by_status),
            "num_cancelled": self.num_cancelled,
            "num_waiting": answering.num_waiting,
            "num_running": answering.num_running,
            "kv_bytes": answering.kv_bytes,
            "kv_bytes_limit": answering.max_memory,
            "tokens_per_second": self.tokens_per_second,
            "alone_reasons": dict(answering.alone_reasons),
        }
