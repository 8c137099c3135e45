"""How a prompt becomes the tokens and arguments of a `generate()` call."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.errors import one_line
from selfspec.serving.fields import RequestError
from selfspec.serving.images import ImageReader
from selfspec.serving.schema import Chat, Completion
from selfspec.serving.settings import Settings

# Texts with more characters for each position of the model are too long. Making tokens of them
# would take seconds, in which no other request is prepared.
_CHARACTERS_A_POSITION = 16
_BESIDE_PROMPTS = ("tools", "chat_template_kwargs", "reasoning_effort", "prediction")
_DEFAULT_TOKENS = 1024  # The most tokens of an answer whose length is not given.

# Token ids, or what a processor made of a prompt.
Encoded = list[int] | dict[str, Any]


def num_tokens(encoded: Sequence[int] | Mapping[str, Any]) -> int:
    """How many tokens there are, with those that stand for images."""
    return len(encoded["input_ids"][0] if isinstance(encoded, Mapping) else encoded)


@dataclass(frozen=True)
class PromptTranslator:
    """Turns prompts and settings into tokens and arguments, within what the model allows.

    What the settings leave out is as in `default`, whose length the user names `length_option`.
    """

    tokenizer: Any
    vocab_size: int
    max_positions: int | None
    default: Mapping[str, Any] = field(default_factory=dict)
    length_option: str = "max_tokens"
    images: ImageReader = field(default_factory=ImageReader)

    def arguments_for(self, prompt: Any, settings: Settings) -> tuple[Encoded, dict[str, Any]]:
        """The tokens of a prompt, with what belongs to its images, and its call's arguments."""
        encoded, arguments = self.encoded(prompt, settings), settings.arguments()
        if isinstance(settings, Chat) and settings.callable_tools:
            arguments["schema"] = self._grammar(settings)
        if "prediction" in arguments:  # The samples of a prompt share its tokens.
            from selfspec.plugin.parts import as_ids

            arguments["prediction"] = as_ids(arguments["prediction"], self.tokenizer)
        self.check_ids("logit_bias", [token for (token,) in arguments.get("sequence_bias", ())])
        arguments = {**self.default, **arguments}
        if settings.ignore_eos:  # An unknown token ends nothing.
            arguments["eos_token_id"] = [self.vocab_size]
        wanted = arguments.get("max_new_tokens")
        setting = settings.length[0] if settings.length else self.length_option
        length = self._length(num_tokens(encoded), wanted, setting)
        if (settings.min_tokens or 0) > length:
            rule = f"min_tokens must be <= {length}, the most tokens of the answer"
            raise RequestError(f"{rule} (got {settings.min_tokens})", field="min_tokens")
        return encoded, {**arguments, "max_new_tokens": length}

    def _grammar(self, chat: Chat) -> str:
        """The form of an answer that may call tools."""
        from selfspec.batch.calls import grammar_of  # Imports torch.

        functions = {tool.function.name: tool.function.parameters for tool in chat.callable_tools}
        is_single = chat.parallel_tool_calls is False
        return grammar_of(functions, self.tokenizer, must_call=chat.must_call, is_single=is_single)

    def encoded(self, prompt: Any, settings: Settings) -> Encoded:
        from selfspec.batch.prompts import inputs_of  # Imports torch.

        is_chat = isinstance(prompt, list) and isinstance(prompt[0], Mapping)
        field = settings.spelled("messages") if is_chat else "prompt"
        prompt = self.images.pictured(prompt, field)
        self._check_size(field, prompt, settings)
        owner, options = self.images.processor or self.tokenizer, dict[str, Any]()
        tools = None
        if isinstance(settings, Chat):
            tools = [tool.model_dump(exclude_none=True) for tool in settings.tools or ()] or None
            options = settings.template_options(owner)
        elif isinstance(settings, Completion) and not settings.add_special_tokens:
            options = {"add_special_tokens": False}
        try:
            ids = inputs_of(prompt, owner, tools, **options)
        except Exception as error:  # A template may raise whatever it likes.
            why = one_line(error)[:300]
            raise RequestError(f"{field} can't be made into tokens: {why}", field=field) from error
        if not num_tokens(ids):
            raise RequestError(f"{field} must have at least one token (got none)", field=field)
        if isinstance(ids, list) and isinstance(prompt, list):
            self.check_ids(field, ids)
        return ids

    def _check_size(self, field: str, prompt: Any, settings: Settings) -> None:
        most = _CHARACTERS_A_POSITION * (self.max_positions or sys.maxsize)
        left, texts = most, {field: prompt}
        texts |= {name: getattr(settings, name, None) for name in _BESIDE_PROMPTS}
        for name, text in texts.items():
            left -= 0 if text is None else len(str(text))
            if left < 0:
                beside = f"must fit into the model's {self.max_positions} positions"
                rule = f"{settings.spelled(name)} {beside}, with all other texts of the request"
                got, code = f"(got more than {most} characters)", "context_length_exceeded"
                raise RequestError(f"{rule} {got}", field=settings.spelled(name), code=code)

    def check_ids(self, field: str, ids: list[int]) -> None:
        if wrong := [token for token in ids if not 0 <= token < self.vocab_size]:
            rule = f"{field} must have ids of the model's {self.vocab_size} tokens"
            raise RequestError(f"{rule} (got {wrong[0]!r:.40})", field=field)

    def _length(self, num_ids: int, wanted: int | None, setting: str) -> int:
        if self.max_positions is None:
            return _DEFAULT_TOKENS if wanted is None else wanted
        num_left = self.max_positions - num_ids
        wanted = min(_DEFAULT_TOKENS, max(num_left, 1)) if wanted is None else wanted
        if wanted > num_left:
            raise RequestError(
                f"prompt and answer must fit into the model's {self.max_positions} positions (got "
                f"{num_ids} + {wanted} tokens); shorten the prompt, or lower {setting}",
                field=setting if num_left > 0 else None,
                code="context_length_exceeded",
            )
        return wanted
