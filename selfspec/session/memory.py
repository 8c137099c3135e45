"""What fits into the memory of a session: the keys and values of its prompts and their answers."""

from __future__ import annotations

from functools import cached_property

from selfspec.compat.generation import kv_of
from selfspec.engine import Engine
from selfspec.errors import ConfigError, UnsupportedError
from selfspec.forward.backends import bytes_of_rows
from selfspec.forward.inputs import foreign_layer
from selfspec.forward.sizes import Limits
from selfspec.machine.memory import amount_in_bytes
from selfspec.prompt import Prompt
from selfspec.runner import ModelRunner


class SharedMemory:
    """The memory that `max_rows` rows share; without an amount, as much as they need."""

    def __init__(self, runner: ModelRunner, max_rows: int, amount: int | str | None) -> None:
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ConfigError(f"max_rows must be a whole number >= 1 (got {max_rows!r})")
        self._runner = runner
        self._max_rows = max_rows
        self._max_bytes = None if amount is None else amount_in_bytes(amount)

    @cached_property
    def limits(self) -> Limits:
        return self._runner.limits(self._max_rows, self._max_bytes)

    @cached_property
    def _column_bytes(self) -> int:
        """Bytes of one column of a row that runs alone; 0 if nobody knows."""
        model = self._runner.model
        return 0 if model.config.is_encoder_decoder else bytes_of_rows(model, 0)[0]

    def check(self, prompt: Prompt) -> None:
        """Refuses a prompt that can never fit."""
        if self._max_bytes is None:
            return
        if prompt.route.alone_reason is not None:
            cache = kv_of(prompt.model_kwargs)
            is_known = hasattr(cache, "layers") and foreign_layer(cache) is None
            if not is_known or not self._column_bytes:
                return  # A recurrent or windowed state takes little room.
            most = most_read = self._max_bytes // self._column_bytes
        else:
            most = (self.limits.max_tokens or 0) - self.limits.surplus
            most_read = most // self._max_rows  # All places are set aside while one is read.
        if prompt.max_columns > most or prompt.num_tokens > most_read:
            raise UnsupportedError(
                f"prompt, answer and drafts must fit into the {most} tokens of max_memory, and the "
                f"prompt into {most_read} while it is read (got {prompt.max_columns}, "
                f"{prompt.num_tokens} of them in the prompt); raise max_memory, or lower "
                "max_rows or max_new_tokens"
            )

    def left_beside(self, prompt: Prompt, engine: Engine) -> int | None:
        """The bytes that running texts and this prompt leave; None: as many as there are."""
        if self._max_bytes is None:
            return None
        if prompt.route.alone_reason is not None:
            return self._max_bytes - self._column_bytes * prompt.max_columns
        longest = max(
            engine.backend.kv.num_columns,
            prompt.max_columns,
            *(row.max_columns for row in engine.rows),
        )
        return self._max_bytes - self.limits.bytes_for(longest)
