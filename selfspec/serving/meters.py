"""What the server counts, for Prometheus and for its own statistics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from selfspec.serving.model_thread import ModelThread


class Meters:
    """Counts requests and tokens. What runs and waits is looked up when a page is asked for."""

    def __init__(self, model: ModelThread) -> None:
        self._model = model
        self.requests: Counter[tuple[str, int]] = Counter()  # By route and status.
        self.counts: dict[str, float] = {
            "requests_cancelled_total": 0,
            "prompt_tokens_total": 0,
            "prompt_tokens_read_total": 0,
            "prompt_tokens_kept_total": 0,
            "new_tokens_total": 0,
            "time_to_first_token_seconds_sum": 0,
            "time_to_first_token_seconds_count": 0,
        }

    def count(self, usage: dict[str, Any], seconds: float) -> None:
        """Counts the answers to a request, whose first token came after some seconds."""
        num_kept = usage["prompt_tokens_details"]["cached_tokens"]
        self.counts["prompt_tokens_total"] += usage["prompt_tokens"]
        self.counts["prompt_tokens_kept_total"] += num_kept
        self.counts["prompt_tokens_read_total"] += usage["prompt_tokens"] - num_kept
        self.counts["new_tokens_total"] += usage["completion_tokens"]
        self.counts["time_to_first_token_seconds_sum"] += seconds
        self.counts["time_to_first_token_seconds_count"] += 1

    def as_text(self) -> str:
        numbers: dict[str, Any] = {
            f'requests_total{{route="{route}",status="{status}"}}': count
            for (route, status), count in self.requests.items()
        }
        numbers |= {**self.counts, **self.numbers()}
        del numbers["alone_reasons"]
        return "".join(f"selfspec_{name} {value or 0}\n" for name, value in numbers.items())

    def numbers(self) -> dict[str, Any]:
        model, stats = self._model, self._model.spec.total_stats
        return {
            "num_waiting": model.num_waiting,
            "num_running": model.session.num_running,
            "kv_bytes": model.session.kv_bytes_in_use,
            "kept_kv_bytes": model.session.kept_kv_bytes,
            "kv_bytes_limit": model.max_memory,
            "drafts_total": stats.num_drafts,
            "draft_tokens_total": stats.num_draft_tokens,
            "accepted_tokens_total": stats.num_accepted_tokens,
            "tokens_per_step": stats.tokens_per_step,
            "alone_reasons": dict(model.session.alone_reasons),
        }
