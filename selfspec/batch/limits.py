"""What fits into the memory for keys and values, and the refusal of what never will."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from selfspec.batch.ticket import Ticket
from selfspec.errors import UnsupportedError
from selfspec.run.rows_backend import RowsBackend, kv_bytes_per_token
from selfspec.run.tree_kv import foreign_layer

__all__ = ["NO_LIMITS", "Limits", "holds_kv"]

_FIX = "raise max_memory, or lower max_rows or max_new_tokens"


class Limits(NamedTuple):
    """How many tokens fit."""

    max_tokens: int  # of all rows together, with answers and drafts
    max_prompt: int

    @classmethod
    def of_rows(cls, backend: RowsBackend) -> Limits:
        """What fits into the rows' share, and into that of a prompt that is being read."""
        limits = (backend.max_tokens, backend.max_prompt)
        return cls(*(sys.maxsize if each is None else each for each in limits))

    @classmethod
    def of_one(cls, model: Any, max_bytes: int) -> Limits:
        """What fits if a text is alone; runs a forward over one token to find out."""
        most = max_bytes // kv_bytes_per_token(model)
        return cls(most, most)

    def check(self, ticket: Ticket) -> None:
        """Refuses a prompt that would not fit if it were the only one."""
        if ticket.need > self.max_tokens:
            raise UnsupportedError(
                f"prompt, answer and drafts must fit into the {self.max_tokens} tokens of "
                f"max_memory (got {len(ticket.ids)} tokens in the prompt, {ticket.need} with the "
                f"answer and drafts); {_FIX}"
            )
        if len(ticket.ids) > self.max_prompt:
            raise UnsupportedError(
                f"a prompt must fit into the {self.max_prompt} tokens of max_memory in which "
                f"prompts are read (got {len(ticket.ids)}); {_FIX}"
            )


NO_LIMITS = Limits(sys.maxsize, sys.maxsize)


def holds_kv(ticket: Ticket) -> bool:
    """Does a call keep all keys and values? A recurrent or windowed state takes little room."""
    cache = ticket.call.model_kwargs.get("past_key_values")
    return hasattr(cache, "layers") and foreign_layer(cache) is None
