"""What the server counts, for Prometheus and for its own statistics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from selfspec.serving.model_thread import ModelThread


class Meters:
    """Counts of requests and tokens. The other numbers are read when somebody asks for them."""

    def __init__(self, model: ModelThread) -> None:
        self._model = model
        self.requests: Counter[tuple[str, int]] = Counter()  # By route and status.
        self.counts: dict[str, float] = {
            "requests_cancelled_total": 0,
            "prompt_tokens_total": 0,
            "new_tokens_total": 0,
            "time_to_first_token_seconds_sum": 0,
            "time_to_first_token_seconds_count": 0,
        }

    def as_text(self) -> str:
        """All numbers in Prometheus' text format."""
        numbers: dict[str, Any] = {
            f'requests_total{{route="{route}",status="{status}"}}': count
            for (route, status), count in self.requests.items()
        }
        numbers |= {**self.counts, **self.numbers()}
        del numbers["alone_reasons"]
        return "".join(f"selfspec_{name} {value or 0}\n" for name, value in numbers.items())

    def numbers(self) -> dict[str, Any]:
        """What runs and waits now, and how much memory it takes."""
        model = self._model
        return {
            "num_waiting": model.num_waiting,
            "num_running": model.session.num_running,
            "kv_bytes": model.session.kv_bytes_in_use,
            "kv_bytes_limit": model.max_memory,
            "tokens_per_step": model.spec.total_stats.tokens_per_step,
            "alone_reasons": dict(model.session.alone_reasons),
        }
