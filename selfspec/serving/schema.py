"""The requests for texts, their fields, and what must not come together.

The lines of prompt files are read by the same models. This module runs no model and knows nothing
of HTTP.
"""

from __future__ import annotations

import logging
from inspect import signature
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from selfspec.serving.fields import Fields, RequestError
from selfspec.serving.messages import (
    FilledText,
    Messages,
    TextPart,
    Tool,
    ToolChoice,
    Tools,
    text_or_parts,
)
from selfspec.serving.settings import MAX_CHOICES, Settings

_log = logging.getLogger("selfspec")

_CACHE = {"prompt_cache_key", "prompt_cache_retention"}  # What was read is found without them.

NumScores = Annotated[int, Field(ge=0, le=20)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Prompts = Annotated[list[FilledText | TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]


class PredictedContent(Fields):
    type: Literal["content"]
    content: Annotated[str | list[TextPart], AfterValidator(text_or_parts)]


class StreamOptions(Fields):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class TextRequest(Settings):
    """The fields that both of OpenAI's routes for texts take."""

    ignored = frozenset({"user", "metadata", "service_tier", "safety_identifier"}) | _CACHE

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    prediction: PredictedContent | None = None

    @property
    def prompts(self) -> list[Any]:
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_choices(self) -> TextRequest:
        if self.n * len(self.prompts) > MAX_CHOICES:
            rule = f"n times the number of prompts must be <= {MAX_CHOICES}"
            raise RequestError(f"{rule} (got {self.n} times {len(self.prompts)})", field="n")
        return self

    def arguments(self) -> dict[str, Any]:
        predicted = self.prediction and self.prediction.content
        return {**super().arguments(), **({"prediction": predicted} if predicted else {})}


class Chat(TextRequest):
    scores_option: ClassVar[str] = "logprobs: true"

    messages: Messages
    logprobs: bool = False
    top_logprobs: NumScores | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] = False
    parallel_tool_calls: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    add_special_tokens: Literal[False] = False  # A template writes its own.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None

    @property
    def prompts(self) -> list[Any]:
        return [[message.as_dict() for message in self.messages]]

    def template_options(self, owner: Any) -> dict[str, Any]:
        """The arguments of a tokenizer's or processor's chat template, beside the messages."""
        from selfspec.compat.generation import template_variables  # Imports transformers.

        variables = self.chat_template_kwargs or {}
        if taken := {*variables} & {"messages", *signature(owner.apply_chat_template).parameters}:
            rule = "chat_template_kwargs must be variables of the template's own"
            raise RequestError(f"{rule} (got {min(taken)!r:.80})", field="chat_template_kwargs")
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort, **variables}
        known = template_variables(owner)
        if ignored := ", ".join(sorted(variables.keys() - known)):
            _log.info("%.200s: ignored, since the chat template does not use that name", ignored)
        options = {name: value for name, value in variables.items() if name in known}
        if self.continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        return options

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that an answer may call: one that is named, or all of them."""
        tools = self.tools or []
        if isinstance(self.tool_choice, ToolChoice):
            return [tool for tool in tools if tool.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else tools

    @property
    def must_call(self) -> bool:
        """Is the answer nothing but calls?"""
        return self.tool_choice not in (None, "none", "auto")

    def arguments(self) -> dict[str, Any]:
        scores = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return {**super().arguments(), **scores}

    @model_validator(mode="after")
    def _check_chat(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            rule = f"top_logprobs must come with {self.scores_option} (got {self.top_logprobs})"
            raise RequestError(rule, field="top_logprobs")
        if self.must_call and not self.callable_tools:
            names = [tool.function.name for tool in self.tools or ()]
            rule = "tool_choice must name one of the tools, or be left out without tools"
            raise RequestError(f"{rule} (got {names!r:.80})", field="tool_choice")
        if self.tools and self.schema_field is not None:
            rule = f"{self.schema_field} must be left out where there are tools"
            raise RequestError(rule, field=self.schema_field)
        return self


class Completion(TextRequest):
    prompt: FilledText | TokenIds | Prompts
    logprobs: NumScores | None = None
    echo: bool = False
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[Any]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)

    def arguments(self) -> dict[str, Any]:
        names = ("logprobs", "prompt_logprobs") if self.echo else ("logprobs",)
        scores = {} if self.logprobs is None else dict.fromkeys(names, self.logprobs)
        return {**super().arguments(), **scores}
