"""The fields of a request, their limits, and the messages for wrong ones.

The server's requests and the lines of prompt files are read by the same models. This module runs no
model and knows nothing of HTTP.
"""

from __future__ import annotations

import json
import logging
import re
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from selfspec.serving.fields import Fields, RequestError, whole_characters
from selfspec.serving.messages import Content, FilledText, Messages, Name, Tool, ToolChoice

MAX_CHOICES = 16  # Answers to one request.
_LEAST_TEMPERATURE = 0.001  # A smaller one means 0: the likeliest token.
_MOST_TOKENS = 1 << 20  # What the model's positions allow is checked when the prompt is encoded.
_LONGEST_STOP = 256  # characters
_SCHEMAS = ("response_format", "guided_json", "guided_choice", "guided_regex", "structured_outputs")
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")

_log = logging.getLogger("selfspec")


def _prompts(value: object) -> list[str | list[int]]:
    prompts: list[Any] = value if isinstance(value, list) and not _are_ids(value) else [value]
    are_prompts = all(
        prompt and (isinstance(prompt, str) or _are_ids(prompt)) for prompt in prompts
    )
    if not (are_prompts and 1 <= len(prompts) <= MAX_CHOICES):
        raise ValueError(f"must be text, token ids, or 1 to {MAX_CHOICES} of these, none empty")
    return [whole_characters(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _not_long(text: str) -> str:
    if len(text) > _LONGEST_STOP:
        raise ValueError(f"must have at most {_LONGEST_STOP} characters")
    return text


Count = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
Share = Annotated[float, Field(ge=0, le=1)]
_Limit = Annotated[int, Field(ge=1, le=1 << 16)]
Words = Annotated[list[FilledText], Field(min_length=1, max_length=64)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumScores = Annotated[int, Field(ge=0, le=20)]
Temperature = Annotated[
    float, Field(ge=0, le=2), AfterValidator(lambda t: t if t >= _LEAST_TEMPERATURE else 0.0)
]
_TopK = Annotated[int, Field(ge=-1, le=_MOST_TOKENS), AfterValidator(lambda k: max(k, 0))]
Stops = Annotated[
    list[Annotated[FilledText, AfterValidator(_not_long)]],
    Field(min_length=1, max_length=4),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Schema(Fields):
    """A schema with its name; whether it is strict or not, an answer keeps to it."""

    name: Name
    description: str | None = None
    schema_: Annotated[
        dict[str, Any], Field(alias="schema", default_factory=lambda: {"type": "object"})
    ]
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have json_schema if its type is that, and only then")
        return self


class PredictedContent(Fields):
    type: Literal["content"]
    content: Content


class Speculative(Fields):
    max_nodes: _Limit


class StructuredOutputs(Fields):
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    choice: Words | None = None
    regex: FilledText | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("must have one of json, choice and regex")
        return self


class Settings(Fields):
    """How an answer is written. What is left out is as the command or the model has it."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_new_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: _TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63 - MAX_CHOICES)] | None = None
    stop: Stops | None = None
    response_format: ResponseFormat | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    speculative: bool | Speculative = True
    # Names of vLLM.
    min_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: Words | None = None
    truncate_prompt_tokens: Count | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_choice: Words | None = None
    guided_regex: FilledText | None = None
    structured_outputs: StructuredOutputs | None = None  # The newer name of these three.

    @property
    def schema_field(self) -> str | None:
        """The field that says what an answer must be; None if any text will do."""
        names = (name for name in _SCHEMAS if getattr(self, name) is not None)
        return next(map(self.spelled, names), None)

    @property
    def answer_schema(self) -> Any:
        """The JSON schema that an answer must keep to, if there is one."""
        if self.structured_outputs is not None:
            return self.structured_outputs.json_
        if self.response_format is None:
            return self.guided_json
        schema = self.response_format.json_schema
        return {"type": "object"} if schema is None else schema.schema_

    @property
    def answer_grammar(self) -> str | None:
        """What an answer must be if that is no JSON: one of some texts, or what a regex matches."""
        outputs = self.structured_outputs or StructuredOutputs.model_construct()
        if choice := self.guided_choice or outputs.choice:
            return f"start: {' | '.join(map(json.dumps, choice))}"
        if regex := self.guided_regex or outputs.regex:
            escaped = re.sub(r"(\\.)|/", lambda escape: escape[1] or "\\/", regex, flags=re.DOTALL)
            return f"start: /{escaped}/"
        return None

    @property
    def lengths(self) -> dict[str, int]:
        """The fields that say how long the answer may be. Where several do, all say the same."""
        names = [name for name in _LENGTHS if name in self.model_fields_set]
        return {self.spelled(name): getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _check_lengths(self) -> Settings:
        if len(set(self.lengths.values())) > 1:
            rule = f"{' and '.join(self.lengths)} must be equal where both are given"
            raise RequestError(f"{rule} (got {self.lengths})", field=[*self.lengths][-1])
        return self

    @model_validator(mode="after")
    def _check_schemas(self) -> Settings:
        names = [name for name in _SCHEMAS if getattr(self, name) is not None]
        for name in ("min_tokens", "ignore_eos") if names or getattr(self, "tools", None) else ():
            if getattr(self, name):  # Then no token might be allowed.
                rule = f"{name} must be left out where there are tools or a schema"
                raise RequestError(f"{rule} (got {getattr(self, name)})", field=name)
        if len(names) > 1:
            rule = f"{' and '.join(names)} exclude each other, since each is a schema"
            raise RequestError(f"{rule}; leave one out", field=names[-1])
        return self

    def arguments(self) -> dict[str, Any]:
        """How tokens are chosen, and how many at most, as arguments of `generate()`.

        Stop strings are not among them, since calls of tools may hold them.
        """
        same = {"top_p", "top_k", "min_p", "repetition_penalty"}
        same |= {"presence_penalty", "frequency_penalty"}
        arguments = self.model_dump(include=same, exclude_none=True)
        for length in self.lengths.values():
            arguments["max_new_tokens"] = length
        if self.temperature is not None:
            arguments |= choice_of(self.temperature)
        if self.logit_bias:
            biases = {(int(token),): bias for token, bias in self.logit_bias.items()}
            arguments["sequence_bias"] = biases
        if self.answer_schema is not None:
            arguments["schema"] = self.answer_schema
        if self.min_tokens is not None:
            arguments["min_new_tokens"] = self.min_tokens
        if self.speculative is not True:
            limit = self.speculative
            arguments["max_nodes"] = limit.max_nodes if isinstance(limit, Speculative) else 1
        return arguments


class StreamOptions(Fields):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class TextRequest(Settings):
    """What both of OpenAI's routes for texts take."""

    model: str | None = None
    user: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    prediction: PredictedContent | None = None

    @property
    def prompts(self) -> list[Any]:
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_together(self) -> TextRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options must come with stream: true", field="stream_options")
        if self.n * len(self.prompts) > MAX_CHOICES:
            rule = f"n times the number of prompts must be <= {MAX_CHOICES}"
            raise RequestError(f"{rule} (got {self.n} times {len(self.prompts)})", field="n")
        return self

    def arguments(self) -> dict[str, Any]:
        predicted = self.prediction and self.prediction.content
        return {**super().arguments(), **({"prediction": predicted} if predicted else {})}


class Chat(TextRequest):
    messages: Messages
    logprobs: bool = False
    top_logprobs: NumScores | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    add_special_tokens: Literal[False] = False  # A template writes its own.
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    @property
    def prompts(self) -> list[Any]:
        return [[message.as_dict() for message in self.messages]]

    def template_options(self, owner: Any) -> dict[str, Any]:
        """What the chat template of a tokenizer or processor gets beside the messages."""
        options = dict(self.chat_template_kwargs or {})
        if taken := {*options} & {"messages", *signature(owner.apply_chat_template).parameters}:
            rule = "chat_template_kwargs must be variables of the template's own"
            raise RequestError(f"{rule} (got {min(taken)!r:.80})", field="chat_template_kwargs")
        if self.reasoning_effort is not None and "reasoning_effort" in str(owner.chat_template):
            options["reasoning_effort"] = self.reasoning_effort
        elif self.reasoning_effort is not None:
            _log.info("reasoning_effort is ignored, since the chat template does not know it")
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
            rule = f"top_logprobs must come with logprobs: true (got {self.top_logprobs})"
            raise RequestError(rule, field="top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError(
                f"tools must have different names (got {names!r:.80})", field="tools"
            )
        if self.tool_choice not in (None, "none") and not self.callable_tools:
            rule = "tool_choice must name one of the tools, or be left out without tools"
            raise RequestError(f"{rule} (got {names!r:.80})", field="tool_choice")
        if names and self.schema_field is not None:
            rule = f"{self.schema_field} must be left out where there are tools"
            raise RequestError(rule, field=self.schema_field)
        return self


class Completion(TextRequest):
    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    logprobs: NumScores | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[Any]:
        return self.prompt

    @model_validator(mode="after")
    def _check_writes(self) -> Completion:
        if self.max_tokens == 0 and (not self.echo or self.logprobs is None):
            rule = "max_tokens must be >= 1, or come with echo: true and logprobs"
            raise RequestError(f"{rule} (got 0)", field="max_tokens")
        return self

    def arguments(self) -> dict[str, Any]:
        names = ("logprobs", "prompt_logprobs") if self.echo else ("logprobs",)
        scores = {} if self.logprobs is None else dict.fromkeys(names, self.logprobs)
        return {**super().arguments(), **scores}


class Tokens(Fields):
    """What `/detokenize` takes."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=_MOST_TOKENS)]


def choice_of(temperature: float) -> dict[str, Any]:
    """The arguments of `generate()` for a temperature; 0 means the likeliest token."""
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
