"""A process of its own for a single `generate()` call; `eval first_call` starts it.

    echo '{"model": PATH, "method": "selfspec", ...}' | python -m eval.jobs.one_call

Reads a job as JSON from its standard input and prints a result as one line of JSON. Nothing is
imported or run before the call but what a user's own script needs for it.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any, NamedTuple


class Job(NamedTuple):
    """What to call, with what. Numbers that are None are left as they are."""

    model: str
    method: str  # "stock", or "selfspec" with `knobs`
    prompt_ids: list[int]
    max_new_tokens: int
    dtype: str
    threads: int | None
    knobs: dict[str, Any]


class Result(NamedTuple):
    """Seconds, each for a part of its own, and the new tokens.

    `import_seconds` are for selfspec alone, torch and transformers being there; 0 for stock.
    """

    call_seconds: float
    load_seconds: float
    import_seconds: float
    new_ids: list[int]
    disabled_reason: str | None


def main() -> int:
    job = Job(**json.loads(sys.stdin.read()))
    print(json.dumps(_run(job)._asdict()))
    return 0


def _run(job: Job) -> Result:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    start = perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype).eval()
    # Both methods write the same number of tokens, whatever half precision makes of the text.
    model.generation_config.eos_token_id = None
    loaded = perf_counter()
    spec = None if job.method == "stock" else _new_spec(model, job.knobs)
    imported = perf_counter()
    ids = torch.tensor([job.prompt_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=job.max_new_tokens,
        do_sample=False,
        **({} if spec is None else {"assistant": spec}),
    )
    end = perf_counter()
    return Result(
        call_seconds=end - imported,
        load_seconds=loaded - start,
        import_seconds=imported - loaded,
        new_ids=output[0, ids.shape[1] :].tolist(),
        disabled_reason=None if spec is None else spec.stats.disabled_reason,
    )


def _new_spec(model: Any, knobs: dict[str, Any]) -> Any:
    from selfspec import SelfSpec, attach

    attach(model, pack=True)
    return SelfSpec(**knobs)


if __name__ == "__main__":
    sys.exit(main())
