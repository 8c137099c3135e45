"""A conversation: its messages, and the KV that the next turn starts from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from selfspec.batch.prompts import encoded
from selfspec.cli.live_text import LiveText
from selfspec.cli.writer import Writer
from selfspec.errors import CliError
from selfspec.plugin import SelfSpec


class Turn(NamedTuple):
    num_reused: int  # Tokens of the prompt that were in the KV already.
    interrupted: bool = False
    is_cut: bool = False  # Did it take all the tokens that it might have?


class Conversation:
    """The messages so far. `show(piece, origin)` gets each answer as it comes."""

    def __init__(
        self,
        writer: Writer,
        spec: SelfSpec,
        show: Callable[[str, str], object],
        *,
        system: str | None = None,
    ) -> None:
        self._writer = writer
        self._spec = spec
        self._show = show
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Starts over with another system message; refuses one that the template does not take."""
        opening = [{"role": "system", "content": _whole(system)}] if system else []
        encoded([*opening, {"role": "user", "content": "?"}], self._writer.tokenizer)
        self._opening = opening
        self.reset()

    def reset(self) -> None:
        """Starts over; what `spec` has learned stays."""
        self.messages = list(self._opening)
        self.forget_kv()

    def forget_kv(self) -> None:
        """Makes the next turn read the whole conversation again."""
        self._kv: Any = None
        self._kv_ids: list[int] = []

    def ask(self, text: str) -> Turn:
        """Streams the answer and keeps it. Ctrl-C ends it; what was shown by then is kept."""
        messages = [*self.messages, {"role": "user", "content": _whole(text)}]
        ids = encoded(messages, self._writer.tokenizer)
        budget = self._budget(len(ids))
        kv, num_reused = self._take_kv(ids)
        live = LiveText(self._writer.tokenizer, ids, self._show)
        turn = Turn(num_reused)
        try:
            output = self._writer.write(
                ids, self._spec, streamer=live, kv=kv, max_new_tokens=budget
            )
        except KeyboardInterrupt:
            turn = turn._replace(interrupted=True)
        else:
            self._keep_kv(output)
            turn = turn._replace(is_cut=output.sequences.shape[1] == len(ids) + budget)
        self.messages = [*messages, {"role": "assistant", "content": live.text}]
        return turn

    def _budget(self, num_prompt_tokens: int) -> int:
        limit = self._writer.loaded.max_positions
        wanted = self._writer.asked.max_new_tokens
        if limit is None:
            return wanted
        if num_prompt_tokens >= limit:
            raise CliError(
                f"the conversation must leave room in the model's {limit} positions "
                f"(got {num_prompt_tokens} tokens); /reset starts over"
            )
        return min(wanted, limit - num_prompt_tokens)

    def _take_kv(self, ids: list[int]) -> tuple[Any, int]:
        """The KV cropped to the tokens it shares with `ids`, or None if it can't be cropped.

        The conversation forgets it, since a call that is interrupted leaves it unusable.
        """
        kv, kv_ids = self._kv, self._kv_ids
        self.forget_kv()
        pairs = zip(kv_ids, ids[:-1], strict=False)  # At least one token must be read.
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        surplus = len(kv_ids) - num_shared
        if not num_shared or (surplus and not _can_crop(kv)):
            return None, 0
        if surplus:
            kv.crop(-surplus)
        return kv, num_shared

    def _keep_kv(self, output: Any) -> None:
        from transformers.cache_utils import DynamicCache

        from selfspec.compat.generation import kv_of

        kv = kv_of(output)
        if type(kv) is DynamicCache:  # Other kinds have a fixed size, or take no second prompt.
            self._kv = kv
            self._kv_ids = output.sequences[0, : kv.get_seq_length()].tolist()


def _whole(text: str) -> str:
    """Refuses what was no UTF-8; the command line and the chat have halves of characters there."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CliError(f"a message must be UTF-8 text (got {text[:40]!r})") from error
    return text


def _can_crop(kv: Any) -> bool:
    """Can tokens be taken back? A sliding window has lost those that would come back into it."""
    return kv.is_croppable and not any(
        layer.is_sliding and layer.get_seq_length() >= layer.sliding_window for layer in kv.layers
    )
