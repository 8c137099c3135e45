"""Stock's switches for decoding, and mixtures of experts that are asked about many tokens at once.

On CUDA, stock copies the weights of the experts of each token while it decodes, which is fast for
one token. For a tree that would be gigabytes in each layer. From a few tokens on, the tokens are
sorted by their experts instead, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from selfspec.compat.generation import decoding_switches, experts_by_number, offer_experts

__all__ = ["decode_mode"]

_NAME = "selfspec_by_number"
_FEW = 4  # Copies are made of at most one in this many experts.


@contextmanager
def decode_mode(model: Any) -> Iterator[None]:
    """Inside, the model has stock's switches for decoding; older transformers have none."""
    ask = getattr(model, "get_experts_implementation", dict)
    before: dict[str, Any] = ask()
    with decoding_switches(model):
        now: dict[str, Any] = ask()
        if now != before and offer_experts(_NAME, _by_number):
            ours = {part: way if way == before[part] else _NAME for part, way in now.items()}
            model.set_experts_implementation(ours)
        yield


def _by_number(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Stock's way to decode for few tokens, its way to read a prompt for many."""
    is_few = top_k_index.numel() * _FEW <= experts.num_experts
    copies = is_few or not _sorts_on_device(experts.down_proj)
    way = experts_by_number(copies=copies)
    return way(experts, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]


def _sorts_on_device(weights: torch.Tensor) -> bool:
    """Has torch a kernel for sorted tokens? Elsewhere the CPU reads how many each expert gets."""
    if weights.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weights.device)[0] in (9, 10)
