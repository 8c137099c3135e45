"""From a prompt and its settings to the tokens and arguments of a call of `generate()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.errors import one_line
from selfspec.serving.schema import RequestError, Settings

_DEFAULT_TOKENS = 1024  # Of an answer, if nobody says how long it may be.


@dataclass(frozen=True)
class Limits:
    """What the model allows."""

    vocab_size: int
    max_positions: int | None

    def call(
        self,
        prompt: Any,
        settings: Settings,
        tokenizer: Any,
        *,
        default: Mapping[str, Any] | None = None,
        length_option: str | None = None,
    ) -> tuple[list[int], dict[str, Any]]:
        """The tokens of a prompt and the arguments of its call; refuses what can't be.

        What the settings leave out is as in `default`, whose length `length_option` names.
        """
        ids = self._encoded(prompt, tokenizer)
        own = settings.arguments()
        self._check_ids("logit_bias", [token for (token,) in own.get("sequence_bias", ())])
        setting = next(iter(settings.length_fields), length_option)
        arguments = {**(default or {}), **own}
        length = self._length(len(ids), arguments.get("max_new_tokens"), setting or "max_tokens")
        return ids, {**arguments, "max_new_tokens": length}

    def _encoded(self, prompt: Any, tokenizer: Any) -> list[int]:
        from selfspec.batch.prompts import encoded  # It brings torch along.

        is_chat = isinstance(prompt, list) and isinstance(prompt[0], Mapping)
        field = "messages" if is_chat else "prompt"
        try:
            ids = encoded(prompt, tokenizer)
        except Exception as error:  # A template may raise whatever it likes.
            why = one_line(error)[:300]
            raise RequestError(f"{field} can't be made into tokens: {why}", field=field) from error
        if not ids:
            raise RequestError(f"{field} must have at least one token (got none)", field=field)
        if isinstance(prompt, list):
            self._check_ids(field, ids)
        return ids

    def _check_ids(self, field: str, ids: list[int]) -> None:
        for each in ids:
            if not 0 <= each < self.vocab_size:
                rule = f"{field} must have ids of the model's {self.vocab_size} tokens"
                raise RequestError(f"{rule} (got {each!r:.40})", field=field)

    def _length(self, num_ids: int, wanted: int | None, setting: str) -> int:
        """How many tokens an answer may have."""
        if self.max_positions is None:
            return _DEFAULT_TOKENS if wanted is None else wanted
        room = self.max_positions - num_ids
        wanted = min(_DEFAULT_TOKENS, max(room, 1)) if wanted is None else wanted
        if wanted > room:
            raise RequestError(
                f"prompt and answer must fit into the model's {self.max_positions} positions (got "
                f"{num_ids} + {wanted} tokens); shorten the prompt, or lower {setting}",
                field=setting if room > 0 else None,
                code="context_length_exceeded",
            )
        return wanted
