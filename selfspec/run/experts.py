"""Stock's switches for decoding, and mixtures of experts that are asked about many tokens at once.

On CUDA, stock copies the weights of the experts of each token while it decodes, which is fast for
one token. For a tree that would be gigabytes in each layer. From a few tokens on, the tokens are
sorted by their experts instead, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

try:
    from transformers.integrations import moe
except ImportError:  # An older version has one way to run experts.
    moe = None

__all__ = ["decode_mode"]

_NAME = "selfspec_by_number"
_STOCKS = "batched_mm"  # What stock decodes with.
_FEW = 4  # Copies are made of at most one in this many experts.


@contextmanager
def decode_mode(model: Any) -> Iterator[None]:
    """Inside, the model has stock's switches for decoding; older transformers have none."""
    ask = getattr(model, "get_experts_implementation", dict)
    before: dict[str, Any] = ask()
    with getattr(model, "_optimize_model_for_decode", nullcontext)():
        now: dict[str, Any] = ask()
        if now != before and moe is not None:
            _offer_our_way()
            ours = {part: way if way == before[part] else _NAME for part, way in now.items()}
            model.set_experts_implementation(ours)
        yield


def _offer_our_way() -> None:
    """Gives our way its name, under which other kinds of experts, such as in FP8, keep stock's."""
    moe.ExpertsInterface.register(_NAME, _by_number)
    for interface in moe.ExpertsInterface.__subclasses__():
        ways = interface()
        if _NAME not in ways and _STOCKS in ways:
            interface.register(_NAME, ways[_STOCKS])


def _by_number(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Stock's way to decode for few tokens, its way to read a prompt for many."""
    is_few = top_k_index.numel() * _FEW <= experts.num_experts
    copies = is_few or not _sorts_on_device(experts.down_proj)
    way = moe.batched_mm_experts_forward if copies else moe.grouped_mm_experts_forward
    return way(experts, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def _sorts_on_device(weights: torch.Tensor) -> bool:
    """Has torch a kernel for sorted tokens? Elsewhere the CPU reads how many each expert gets."""
    if weights.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weights.device)[0] in (9, 10)
