"""What drafts do for one family: a small random model answers with stock's loop and with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import dropwhile
from operator import not_
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from selfspec import SelfSpec, UnsupportedError, attach
from selfspec.compat.generation import KV
from selfspec.draft.sources import Cursor, RowStart, Source
from selfspec.records import Candidate, Evidence, StepRecord
from tools.census_families.inputs import Inputs, continued, media_inputs, media_of, text_inputs
from tools.census_families.shrink import small_model

FAULTS = ("wrong text", "error", "no draft accepted")

_NUM_NEW = 12
_GREEDY: dict[str, Any] = {"do_sample": False}
_SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 40}

Answer = Callable[..., torch.Tensor]  # The ids of a call; drafts are options of it.
Prompts = Callable[[int], Inputs]  # of so many rows


class Verdict(NamedTuple):
    """How a family is served, with what in its prompt, and why not better.

    `served` is how the first way was: "trees", "chains", "plain" or "refused"; or else a fault of
    selfspec (`FAULTS`), or why nothing was tried. `ways` says it for each way.
    """

    family: str
    served: str
    prompt: str = "text"
    reason: str = ""
    ways: dict[str, str] = {}  # noqa: RUF012  # It is never changed.


class Remembered(Source):
    """Stock's own texts, with wrong tokens beside the right ones, and sometimes in front of them.

    So drafts are accepted and refused in the middle of each tree and chain.
    """

    name = "remembered"

    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = []

    def open(self, row: RowStart) -> Cursor:
        return _Reader(self.texts, tuple(row.prompt_ids))


class _Reader(Cursor):
    def __init__(self, texts: Sequence[tuple[int, ...]], text: tuple[int, ...]) -> None:
        self._texts, self._text = texts, text

    def root(self) -> tuple[int, ...]:
        return self._text

    def follow(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def expand(self, state: tuple[int, ...]) -> list[Candidate]:
        num = len(state)
        right = {text[k] for text in self._texts if (k := _overlap(state, text)) and k < len(text)}
        wrong = [token for token in (3 + 7 * num % 89, 4 + 5 * num % 89) if token not in right]
        tokens = [*wrong, *right] if num % 4 == 0 else [*right, *wrong]
        return [(token, Evidence(Remembered.name)) for token in dict.fromkeys(tokens)]

    def observe(self, record: StepRecord) -> None:
        self._text += tuple(record.committed_ids)


def _overlap(state: Sequence[int], text: Sequence[int]) -> int:
    """How much of a text's beginning the state ends with; an encoder's text may come before it."""
    lengths = range(min(len(state), len(text)), 0, -1)
    return next((k for k in lengths if state[-k:] == text[:k]), 0)


def verdict(family: str) -> Verdict:
    """Tries one family; what the model can't do with stock's loop either is no fault."""
    try:
        model = attach(small_model(family))
        prompts, trouble = _prompts(model)
    except Exception as error:
        return Verdict(family, "not made", reason=_line(error))
    source = Remembered()
    spec = SelfSpec(budget="fixed", max_nodes=16, sources=(), extra_sources=[source])
    found = {
        f"{way}, {prompt}" if number else way: _tried(answer, spec, source)
        for number, (prompt, maker) in enumerate(prompts.items())
        for way, answer in _ways(model, maker).items()
    }
    ways = {name: served for name, (served, _) in found.items()}
    first = next((name for name in found if ways[name] in FAULTS), "greedy")
    served, reason = found[first]
    if served in FAULTS:
        reason = f"{first}: {reason}"
    elif served == "stock fails":
        served, reason = "not made", trouble or reason
    elif trouble:
        what = "text alone" if "text" in prompts else "the other"
        served, reason = "image not made", f"{trouble}; {what}: {served} {reason}".strip()
    else:
        same = (served, "stock fails")
        others = {f"{name}: {why}" for name, (how, why) in found.items() if how not in same and why}
        reason = "; ".join(filter(None, [reason, *sorted(others)]))
    return Verdict(family, served, ", ".join(prompts), reason, ways)


def _prompts(model: Any) -> tuple[dict[str, Prompts], str]:
    """What makes prompts, by what is in them; and why none with an image or a sound."""
    prompts: dict[str, Prompts] = {}
    trouble = ""
    for kind in media_of(model):
        try:
            _check_seen(model, media_inputs(model, kind=kind))
            prompts[kind] = partial(media_inputs, model, kind=kind)
        except Exception as error:
            trouble = f"{kind}: {_line(error)}"
    if not prompts:
        prompts = {"text": text_inputs}
        _generate(model, text_inputs(), _GREEDY)  # Some models change in their first call.
    return prompts, trouble


def _check_seen(model: Any, inputs: Inputs) -> None:
    """Raises where the model can't read its image, or where the image changes nothing."""
    others = {n: v.flip(-1) if v.is_floating_point() else v for n, v in inputs.items()}
    _generate(model, inputs, _GREEDY)
    with torch.no_grad():
        logits = [model(**each).logits[:, -1] for each in (inputs, others)]
    if logits[0].equal(logits[1]):
        raise ValueError("the image changes no logits")


def _ways(model: Any, prompts: Prompts) -> dict[str, Answer]:
    """The calls that are compared, as functions of the options that draft."""

    def call(num_rows: int, options: dict[str, Any], **ours: Any) -> torch.Tensor:
        return _generate(model, prompts(num_rows), options, **ours)

    ways: dict[str, Answer] = {
        "greedy": partial(call, 1, _GREEDY),
        "sampled": partial(call, 1, _SAMPLED),
        "batch": partial(call, 2, _SAMPLED),
        "three": partial(call, 1, {**_SAMPLED, "num_return_sequences": 3}),
    }
    if model.config.is_encoder_decoder:  # The encoder reads the prompt at once, and anew each time.
        return ways
    return ways | {
        "turns": partial(_turns, model, prompts),
        "chunks": partial(call, 1, {**_GREEDY, "prefill_chunk_size": 6}),
    }


def _turns(model: Any, prompts: Prompts, **ours: Any) -> torch.Tensor:
    """Two turns over one KV cache, which the first one leaves to the second."""
    kv = {KV: DynamicCache(config=model.config.get_text_config(decoder=True))}
    inputs = prompts(1)
    ids = _generate(model, inputs, {**_GREEDY, **kv}, **ours)
    return _generate(model, continued(inputs, ids), {**_GREEDY, **kv}, **ours)


def _generate(model: Any, inputs: Inputs, options: dict[str, Any], **ours: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**inputs, **options, **ours, max_new_tokens=_NUM_NEW)


def _tried(answer: Answer, spec: SelfSpec, source: Remembered) -> tuple[str, str]:
    """How one call is served, and why not better."""
    try:
        stock, state = answer(), torch.get_rng_state()
    except Exception as error:
        return "stock fails", _line(error)
    source.texts = [tuple(dropwhile(not_, row)) for row in stock.tolist()]  # without padding
    try:
        ours = answer(assistant=spec)
    except UnsupportedError as error:
        return "refused", _line(error)
    except Exception as error:
        return "error", _line(error)
    if not ours.equal(stock) or not torch.get_rng_state().equal(state):
        return "wrong text", f"{ours.tolist()} for {stock.tolist()}"[:400]
    stats = spec.stats
    if stats.mode == "plain":
        return "plain", stats.disabled_reason or ""
    if not sum(number * times for number, times in stats.accepted_lengths.items()):
        return "no draft accepted", f"{stats.mode}, {stats.num_nodes} nodes"
    return f"{stats.mode}s", stats.disabled_reason or ""


def _line(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
