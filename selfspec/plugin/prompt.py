"""The prompt's forward, and what the LUTs learn from it.

Stock asks the model only for the logits of the last token, and so do we. A hook keeps the hidden
states that enter the output head, and the head is run again over some of them in chunks. So the
logits of the whole prompt are never held at once, and the first token is chosen from exactly the
logits that stock would have.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from selfspec.draft.memory import Memory
from selfspec.engine import top_k_of

__all__ = ["PromptTap", "last_pairs"]

_CHUNK_ELEMENTS = 1 << 22  # At most so many logits are held at a time.
# The LUTs learn from the last tokens of each row. More tokens bring very little, and the head has
# to be run for each of them, which is slow on a CPU.
_NUM_TEACHING = {"cpu": 16, "other": 64}


class PromptTap:
    """Collects the hidden states that enter the output head in the prompt's forward."""

    def __init__(self, model: Any, *, listens: bool = True) -> None:
        self._head: Any = model.get_output_embeddings() if listens else None
        self._hidden: list[torch.Tensor] = []

    @contextmanager
    def open(self, model_kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the arguments for the prompt's forward; hidden states are collected inside.

        Only this thread's forwards count, since others may run the same model meanwhile.
        """
        if self._head is None or model_kwargs.get("logits_to_keep") != 1:
            yield model_kwargs
            return
        owner = threading.get_ident()

        def keep_last(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if threading.get_ident() != owner:
                return None
            self._hidden.append(args[0])
            return (args[0][:, -1:], *args[1:])

        handle = self._head.register_forward_pre_hook(keep_last)
        try:
            yield {**model_kwargs, "logits_to_keep": 0}
        finally:
            handle.remove()

    def teach(
        self,
        memory: Memory,
        input_ids: torch.Tensor,  # (B, L)
        visible: torch.Tensor | None,  # (B, >= L)
        last_logits: torch.Tensor,  # (B, V)
    ) -> None:
        """Shows the sources the model's most likely tokens after the last tokens of the prompt.

        If two tokens in a row occur several times, only the last occurrence is shown, since the
        sources would keep no other.
        """
        if not self._hidden:
            return
        hidden = torch.cat(self._hidden, dim=1)
        self._hidden.clear()
        num_teaching = _NUM_TEACHING.get(hidden.device.type, _NUM_TEACHING["other"])
        length = min(hidden.shape[1], input_ids.shape[1], num_teaching)
        if length == 0:
            return
        scale = self._scale(hidden[:, -1:], last_logits)
        pairs = last_pairs(input_ids.cpu(), None if visible is None else visible.cpu(), length)
        hidden = hidden[:, -length:].reshape(-1, hidden.shape[-1])
        indices = _last_of_each(pairs)
        chunk = max(_CHUNK_ELEMENTS // last_logits.shape[-1], 1)
        for part in torch.split(indices, chunk):
            logits = self._head(hidden[part.to(hidden.device)]) * scale
            memory.observe_pairs(pairs[part].numpy(), top_k_of(logits, memory.top_k))

    def _scale(self, last_hidden: torch.Tensor, last_logits: torch.Tensor) -> float:
        """The factor by which a model such as Cohere or Granite scales its head's output."""
        raw = self._head(last_hidden)[:, 0].float()
        return float((raw * last_logits.float()).sum() / (raw * raw).sum().clamp(min=1e-12))


def last_pairs(input_ids: torch.Tensor, visible: torch.Tensor | None, length: int) -> torch.Tensor:
    """(B * length, 2): the last two tokens at each of the last columns; -1 stands for none."""
    ids = torch.nn.functional.pad(input_ids, (1, 0), value=-1)
    if visible is not None:
        ids[:, 1:].masked_fill_(~visible[:, -input_ids.shape[1] :], -1)
    return torch.stack([ids[:, -length - 1 : -1], ids[:, -length:]], dim=-1).reshape(-1, 2)


def _last_of_each(pairs: torch.Tensor) -> torch.Tensor:
    """The index of each pair's last occurrence, without pairs that end in padding."""
    tokens = map(tuple, pairs.tolist())
    last = {pair: index for index, pair in enumerate(tokens) if pair[1] >= 0}
    return torch.tensor(sorted(last.values()), dtype=torch.long)
