"""What the server counts, for Prometheus and for its own statistics.

Dashboards for vLLM's servers work too: what both count has its name there as well.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from selfspec.serving.model_thread import ModelThread


class Meters:
    """Counts requests and tokens. What runs and waits is looked up when a page is asked for."""

    def __init__(self, model: ModelThread, name: str) -> None:
        self._model = model
        self._name = name
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

    def as_text(self) -> str:
        numbers: dict[str, Any] = {
            f'requests_total{{route="{route}",status="{status}"}}': count
            for (route, status), count in self.requests.items()
        }
        numbers |= {**self.counts, **self.numbers()}
        del numbers["alone_reasons"]
        ours = {f"selfspec_{name}": value or 0 for name, value in numbers.items()}
        named = {**ours, **self._as_in_vllm()}
        return "".join(f"{name} {value}\n" for name, value in named.items())

    def _as_in_vllm(self) -> dict[str, float]:
        """The counts that vLLM has too, by its names and with its label."""
        stats, model = self._model.spec.total_stats, self._model
        counts: dict[str, float] = {
            "spec_decode_num_drafts_total": stats.num_drafts,
            "spec_decode_num_draft_tokens_total": stats.num_draft_tokens,
            "spec_decode_num_accepted_tokens_total": stats.num_accepted_tokens,
            "prompt_tokens_total": self.counts["prompt_tokens_total"],
            "prefix_cache_queries_total": self.counts["prompt_tokens_total"],
            "prefix_cache_hits_total": self.counts["prompt_tokens_kept_total"],
            "generation_tokens_total": self.counts["new_tokens_total"],
            "num_requests_running": model.session.num_running,
            "num_requests_waiting": model.num_waiting,
        }
        # A label's value may be any text in quotation marks, with these escaped.
        label = f"model_name={json.dumps(self._name, ensure_ascii=False)}"
        named = {f"vllm:{name}{{{label}}}": value for name, value in counts.items()}
        accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        for place, number in enumerate(stats.num_accepted_tokens_per_pos):
            named[f'{accepted}{{{label},position="{place}"}}'] = number
        return named

    def numbers(self) -> dict[str, Any]:
        model = self._model
        return {
            "num_waiting": model.num_waiting,
            "num_running": model.session.num_running,
            "kv_bytes": model.session.kv_bytes_in_use,
            "kept_kv_bytes": model.session.kept_kv_bytes,
            "kv_bytes_limit": model.max_memory,
            "tokens_per_step": model.spec.total_stats.tokens_per_step,
            "alone_reasons": dict(model.session.alone_reasons),
        }
