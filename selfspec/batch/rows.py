"""The texts that are being written at the same time: one decoder, and the KV that they share out.

Also what can never fit into it. Knows nothing of the texts that wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from selfspec.batch.ticket import Ticket
from selfspec.config import SpecConfig
from selfspec.engine import Decoder, first_tokens
from selfspec.errors import UnsupportedError
from selfspec.machine.device import device_for
from selfspec.plugin.call import keep_up
from selfspec.plugin.spec import SelfSpec
from selfspec.run.model import device_of
from selfspec.run.prepared import Prepared
from selfspec.run.prompt import Prompt
from selfspec.run.rows_backend import RowsBackend
from selfspec.stats import GenerationStats
from selfspec.verify.verifier import Verifier

Committed = dict[int, list[int]]  # New tokens by the index of the ticket.
_FIX = "raise max_memory, or lower max_rows or max_new_tokens"


class Limits(NamedTuple):
    """How many tokens fit."""

    max_tokens: int | None  # of all rows together, with answers and drafts; None: any number
    max_prompt: int | None

    def check(self, ticket: Ticket) -> None:
        """Refuses a prompt that would not fit if it were the only one."""
        if self.max_tokens is not None and ticket.need > self.max_tokens:
            raise UnsupportedError(
                f"prompt, answer and drafts must fit into the {self.max_tokens} tokens of "
                f"max_memory (got {len(ticket.ids)} tokens in the prompt, {ticket.need} with the "
                f"answer and drafts); {_FIX}"
            )
        if self.max_prompt is not None and len(ticket.ids) > self.max_prompt:
            raise UnsupportedError(
                f"a prompt must fit into the {self.max_prompt} tokens of max_memory in which "
                f"prompts are read (got {len(ticket.ids)}); {_FIX}"
            )


NO_LIMITS = Limits(None, None)


class Rows:
    """Rows that come and go, at most `max_rows`, whose keys and values take `max_bytes` at most."""

    def __init__(
        self,
        model: Any,
        spec: SelfSpec,
        config: SpecConfig,
        *,
        max_rows: int,
        max_bytes: int | None,
    ) -> None:
        self.max_rows = max_rows
        self._model = model
        self._spec = spec
        self._config = config
        self._max_bytes = max_bytes
        self._tickets: dict[int, Ticket] = {}
        self._verifier = Verifier()
        self._decoder: Decoder | None = None
        self._backend: RowsBackend | None = None
        self._left: list[int] = []  # Rows that have stopped and were not given back yet.
        self._has_changed = True  # Have rows come or gone since the last step?

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def kv_bytes(self) -> int:
        """What is set aside for keys and values."""
        return 0 if self._backend is None else self._backend.kv.nbytes

    @property
    def kv_bytes_in_use(self) -> int:
        """What the keys and values of all rows take."""
        return 0 if self._backend is None else self._backend.kv.bytes_in_use

    def open(self, prepared: Prepared) -> RowsBackend:
        """Makes what runs the forwards, if it is not there; tells how much fits into it."""
        if self._backend is None:
            self._backend = prepared.rows_backend(self.max_rows, self._max_bytes)
        self._backend.kind = prepared.kind
        return self._backend

    def close(self) -> None:
        """Gives back the memory of rows that have all ended."""
        self._decoder = self._backend = None

    def start(self, ticket: Ticket, prompt: Prompt, prepared: Prepared) -> Committed:
        """Gives a prompt that was read a row; returns its first token."""
        call, backend, index = ticket.call, self.open(prepared), ticket.index
        with prepared.reading():
            memory = self._spec.learn(call, prompt)
        if self._decoder is None:
            device = device_for(device_of(self._model), overlap=self._config.overlap)
            batch = (backend, self._verifier, device, self.max_rows)
            self._decoder = call.decoder(prepared, *batch)
        decoder = self._decoder
        (row,) = call.rows(prompt, memory, decoder)
        row.index = index
        self._tickets[index] = ticket
        self._has_changed = True
        self._verifier.texts[index] = call.texts(prepared.ability, decoder.device)[0]
        backend.add_row(prompt.cache, prompt.next_positions, ticket.need)
        decoder.stats = call.stats
        first = first_tokens(self._verifier, [index], prompt.last_tokens, prompt.logits)
        with prepared.decoding():
            decoder.add([row], first)
        return {record.row: record.committed_ids for record in first.records}

    def step(self, prepared: Prepared) -> Committed:
        """One step of all rows. Each one's statistics get its own counts and a share of time."""
        decoder, has_changed = self._decoder, self._has_changed
        assert decoder is not None
        of_batch = (prepared, decoder.backend, decoder.budget)
        decoder.before_step = partial(keep_up, *of_batch, has_changed=has_changed)
        self._has_changed = False
        of_step = decoder.stats = GenerationStats()
        with prepared.decoding():
            records = decoder.step()
        for record in records:
            stats = self._tickets[record.row].call.stats
            stats.count_step(record)
            stats.add_share(of_step, len(records))
        return {record.row: record.committed_ids for record in records}

    def drop(self, index: int) -> Ticket | None:
        """Takes a row out in the midst of its text; None if there is no such row."""
        if index not in self._tickets:
            return None
        self._verifier.texts[index].stop()
        self._let_go()
        self._left.remove(index)
        del self._verifier.texts[index]
        return self._tickets.pop(index)

    def ended(self) -> list[tuple[Ticket, list[int]]]:
        """The rows that have ended, which leave, with their new tokens."""
        self._let_go()
        indices, self._left = self._left, []
        tickets = [self._tickets.pop(index) for index in indices]
        texts = [self._verifier.texts.pop(index).transcript for index in indices]
        new = [text.sequences()[0, text.prompt_length :].tolist() for text in texts]
        return list(zip(tickets, new, strict=True))

    def _let_go(self) -> None:
        """Lets all rows that have stopped leave the forwards; `ended` gives them back."""
        if self._decoder is not None:
            left = [row.index for row in self._decoder.drop_done_rows()]
            self._has_changed |= bool(left)
            self._left += left


def config_for_rows(config: SpecConfig, model: Any) -> tuple[SpecConfig, str | None]:
    """The config with a way to run forwards that rows can come and go in, and why it differs."""
    captures = device_for(device_of(model), overlap=False).can_capture
    if config.forward != "graph" and not (config.forward == "auto" and captures):
        return config, None
    reason = "captured forwards have a fixed number of rows, and here rows come and go"
    if config.forward == "graph" and config.strict:
        raise UnsupportedError(f"strict=True and forward='graph' can't be had: {reason}")
    return config.changed(forward="eager"), reason
