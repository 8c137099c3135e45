"""What the server counts, for Prometheus and for whoever looks at its statistics."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from selfspec.serving.model_thread import ModelThread

_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_GAUGES = {
    "num_waiting": ("texts_waiting", "Texts that wait for a row."),
    "num_running": ("texts_running", "Texts that are being written."),
    "kv_bytes": ("kv_bytes", "What the keys and values of all rows take."),
    "kv_bytes_limit": ("kv_bytes_limit", "What they may take."),
    "tokens_per_step": ("tokens_per_step", "Tokens of a text in a step."),
}


class Meters:
    """Counters of requests and tokens. Everything else is looked up when somebody asks."""

    def __init__(self, model: ModelThread) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        own: Any = {"namespace": "selfspec", "registry": self._registry}
        self.requests = Counter("requests", "Requests that ended.", ["route", "status"], **own)
        self.cancelled = Counter("requests_cancelled", "Requests whose client had gone.", **own)
        about = "From a request to its first token."
        self.first = Histogram("time_to_first_token_seconds", about, buckets=_SECONDS, **own)
        self.read = Counter("prompt_tokens", "Tokens of answered prompts.", **own)
        self.written = Counter("new_tokens", "Tokens of answers.", **own)
        for key, (name, about) in _GAUGES.items():
            Gauge(name, about, **own).set_function(lambda key=key: self.numbers()[key] or 0)

    def as_text(self) -> bytes:
        return bytes(generate_latest(self._registry))

    def numbers(self) -> dict[str, Any]:
        model = self._model
        return {
            "num_waiting": model.num_waiting,
            "num_running": model.session.num_running,
            "kv_bytes": model.session.kv_bytes_in_use,
            "kv_bytes_limit": model.max_memory,
            "tokens_per_step": model.spec.total_stats.tokens_per_step,
            "alone_reasons": dict(model.session.alone_reasons),
        }
