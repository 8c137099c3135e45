"""What drafts do for one family: a small random model answers with stock's loop and with drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from eval.families.inputs import Inputs, media_inputs, text_inputs
from eval.families.shrink import small_model
from selfspec import SelfSpec, UnsupportedError, attach

_NUM_NEW = 12
_CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 40},
}


class Verdict(NamedTuple):
    """How a family is served, with what in its prompt, and why not better."""

    family: str
    served: str  # trees, chains, plain, refused, wrong text, error, not made
    prompt: str = "text"
    reason: str = ""


def verdict(family: str) -> Verdict:
    """Tries one family; an error of the model's own, with stock's loop, is "not made"."""
    try:
        model = small_model(family)
        inputs, prompt = _inputs(model)
        stock = {name: _answer(model, inputs, call) for name, call in _CALLS.items()}
    except Exception as error:
        return Verdict(family, "not made", reason=_line(error))
    try:
        return _tried(family, model, inputs, stock)._replace(prompt=prompt)
    except UnsupportedError as error:
        return Verdict(family, "refused", prompt, _line(error))
    except Exception as error:
        return Verdict(family, "error", prompt, _line(error))


def _inputs(model: Any) -> tuple[Inputs, str]:
    """A prompt with an image or a sound that stock can read, or else text alone."""
    try:
        if (inputs := media_inputs(model)) is not None:
            _answer(model, inputs, _CALLS["greedy"])
            return inputs, "image" if "pixel_values" in inputs else "sound"
    except Exception:  # The model takes them in a form that is not known here.
        pass
    return text_inputs(), "text"


def _answer(model: Any, inputs: Inputs, call: dict[str, Any], **ours: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return model.generate(**inputs, **call, **ours, max_new_tokens=_NUM_NEW)  # type: ignore[no-any-return]


def _tried(family: str, model: Any, inputs: Inputs, stock: dict[str, torch.Tensor]) -> Verdict:
    """Drafts are what stock wrote, with a wrong token in the middle."""
    attach(model)
    spec = SelfSpec(budget="fixed", max_nodes=16)
    for name, call in _CALLS.items():
        guess = stock[name][0, -_NUM_NEW:].tolist()
        guess[_NUM_NEW // 2] = (guess[_NUM_NEW // 2] + 1) % 90
        ours = _answer(model, inputs, call, assistant=spec, prediction=guess)
        if not ours.equal(stock[name]):
            return Verdict(family, "wrong text", reason=f"{name}, not stock's")
    reason = spec.stats.disabled_reason or ""
    if not spec.total_stats.num_nodes:
        return Verdict(family, "plain", reason=reason)
    return Verdict(family, "chains" if "chain" in reason else "trees", reason=reason)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
