"""The fields of a request, their limits, and what a wrong one is told.

The server's requests and the lines of prompt files are read by the same models. This module runs no
model and knows nothing of HTTP.
"""

from __future__ import annotations

import json
import re
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from selfspec.errors import SelfSpecError, unknown_name

MAX_CHOICES = 16  # Answers to one request.
_LEAST_TEMPERATURE = 0.001  # A smaller one divides by what float32 may take for zero.
_MOST_TOKENS = 1 << 20  # What the model's positions allow is checked when the prompt is encoded.
_NOT_HERE = "is not supported here; leave it out"

_short = Repr()
_short.maxstring = _short.maxother = 80


class RequestError(SelfSpecError, ValueError):
    """A request, or a line of a prompt file, that can't be answered, and which field is wrong."""

    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be whole characters, not half of one at {error.start}") from None
    return text


def _joined(value: Any) -> Any:
    """The texts of OpenAI's content parts, one behind the other."""
    if not isinstance(value, list):
        return value
    for part in value:
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        if not is_text or set(part) != {"type", "text"} or part["type"] != "text":
            raise ValueError("must be text, or a list of parts with type: 'text', and text")
    return "".join(part["text"] for part in value)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not_tiny(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"must be 0, or a number from {_LEAST_TEMPERATURE} to 2")
    return temperature


def _name(value: Any) -> Any:
    if type(value) not in (int, str):
        raise ValueError("must be text or a whole number")
    return _whole_characters(value) if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion: texts or token ids."""
    rule = f"must be text, token ids, or a list of 1 to {MAX_CHOICES} of these"
    prompts = value if isinstance(value, list) and not _are_ids(value) else [value]
    if not 1 <= len(prompts) <= MAX_CHOICES:
        raise ValueError(rule)
    for prompt in prompts:
        if not (isinstance(prompt, str) and prompt) and not _are_ids(prompt):
            raise ValueError(f"{rule}, none of them empty")
    return [_whole_characters(each) if isinstance(each, str) else each for each in prompts]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _only(*allowed: Any, rule: str = _NOT_HERE) -> AfterValidator:
    """For a field that may be there, as long as it asks for nothing."""

    def check(value: Any) -> Any:
        for each in allowed:
            if isinstance(value, bool) == isinstance(each, bool) and value == each:
                return value
        raise ValueError(rule)

    return AfterValidator(check)


Text = Annotated[str, AfterValidator(_whole_characters)]
FilledText = Annotated[str, Field(min_length=1), AfterValidator(_whole_characters)]
Content = Annotated[Text, BeforeValidator(_joined)]
Count = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[Any, AfterValidator(_name)]
# transformers compares every token with each place of each stop string. Longer ones take seconds.
StopString = Annotated[FilledText, Field(max_length=32)]
Stops = Annotated[list[StopString], Field(min_length=1, max_length=4), BeforeValidator(_listed)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
NotHere = Annotated[Any, _only()]
NoTools = Annotated[Any, _only([], "none")]
NoPenalty = Annotated[
    Any, _only(0, rule="must be 0: no such penalty is here; repetition_penalty is another")
]


class _Fields(BaseModel):
    """Fields as JSON has them. One that is null counts as left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None}


class Message(_Fields):
    """What one side of a conversation said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None

    def as_dict(self) -> dict[str, str]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


Messages = Annotated[list[Message], Field(min_length=1)]


class Prediction(_Fields):
    """An answer that is mostly known."""

    type: Literal["content"]
    content: Content


class Settings(_Fields):
    """How an answer is written. What is left out is as the command or the model has it."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_new_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_not_tiny)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63 - MAX_CHOICES)] | None = None
    stop: Stops | None = None

    @property
    def length_fields(self) -> list[str]:
        """The fields that say how long the answer may be, at most one in the end."""
        names = ("max_tokens", "max_completion_tokens", "max_new_tokens")
        return [name for name in names if name in self.model_fields_set]

    @model_validator(mode="after")
    def _check_lengths(self) -> Settings:
        for other in self.length_fields[1:]:
            first = self.length_fields[0]
            if (got := getattr(self, other)) != (length := getattr(self, first)):
                rule = f"{other} must be equal to {first} where both are given"
                raise RequestError(f"{rule} (got {got} and {length})", field=other)
        return self

    def arguments(self) -> dict[str, Any]:
        """How tokens are chosen, and how many at most, as arguments of `generate()`."""
        same = {"top_p", "top_k", "min_p", "repetition_penalty"}
        arguments = self.model_dump(include=same, exclude_none=True)
        for name in self.length_fields:
            arguments["max_new_tokens"] = getattr(self, name)
        if self.temperature is not None:
            arguments["do_sample"] = self.temperature > 0
        if self.temperature:
            arguments["temperature"] = self.temperature
        if self.logit_bias:
            arguments["sequence_bias"] = {
                (int(token),): bias for token, bias in self.logit_bias.items()
            }
        if self.stop:
            arguments["stop_strings"] = self.stop
        return arguments


class StreamOptions(_Fields):
    """What a stream says beside its text."""

    include_usage: bool = False


class Request(Settings):
    """What both of OpenAI's routes for texts take."""

    model: Text | None = None
    user: Text | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    frequency_penalty: NoPenalty = None
    presence_penalty: NoPenalty = None

    @property
    def prompts(self) -> list[Any]:
        """What is answered: texts, conversations or token ids."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_together(self) -> Request:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options must come with stream: true", field="stream_options")
        if self.n * len(self.prompts) > MAX_CHOICES:
            rule = f"n times the number of prompts must be <= {MAX_CHOICES}"
            raise RequestError(f"{rule} (got {self.n} times {len(self.prompts)})", field="n")
        return self

    def arguments(self) -> dict[str, Any]:
        """The arguments of `generate()`, the predicted text among them."""
        predicted = self.prediction and self.prediction.content
        return {**super().arguments(), **({"prediction": predicted} if predicted else {})}


class Chat(Request):
    """The body of a chat completion."""

    messages: Messages
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    service_tier: Text | None = None
    audio: NoTools = None
    functions: NoTools = None
    function_call: NoTools = None
    tools: NoTools = None
    tool_choice: NoTools = None
    reasoning_effort: NotHere = None
    verbosity: NotHere = None
    web_search_options: NotHere = None
    modalities: Annotated[Any, _only(["text"], rule="must be ['text']")] = None
    response_format: Annotated[
        Any,
        _only(
            {"type": "text"},
            rule="must be {'type': 'text'}: answers can't be held to JSON or a schema here",
        ),
    ] = None
    logprobs: Annotated[Any, _only(False)] = None
    top_logprobs: Annotated[Any, _only(0)] = None
    store: Annotated[Any, _only(False, rule="must be false, since nothing is stored")] = None

    @property
    def prompts(self) -> list[Any]:
        """The one conversation."""
        return [[each.as_dict() for each in self.messages]]


class Completion(Request):
    """The body of a completion."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: NotHere = None
    echo: Annotated[Any, _only(False)] = None
    suffix: Annotated[Any, _only("")] = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[Any]:
        """Texts or token ids."""
        return self.prompt

    @model_validator(mode="after")
    def _check_best(self) -> Completion:
        if self.best_of not in (None, self.n):
            rule = "best_of must be n: the best ones are not chosen"
            raise RequestError(f"{rule} (got {self.best_of})", field="best_of")
        return self


Known = TypeVar("Known", bound=BaseModel)


def checked(kind: type[Known], value: Any) -> Known:
    """The fields, each of which keeps to its rule."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _refusal(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """The first fault, told as name, rule and value."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    name, *inside = first["loc"] or ("",)
    field = str(name)[:40]
    if first["type"] == "extra_forbidden" and not inside:
        return RequestError(unknown_name("field", field, kind.model_fields), field=field)
    where = field + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part:.40}" for part in inside
    )
    rule = re.sub(r"^(Value error, |\w+ should )", "", first["msg"])
    rule = rule if rule.startswith("must ") or rule == _NOT_HERE else f"must {rule}"
    if first["type"] == "missing":
        return RequestError(f"{where} must be given (got nothing)", field=field)
    return RequestError(f"{where} {rule} (got {_short.repr(first['input'])})", field=field)


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """What JSON says, which must be an object; `what` names it in messages."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise RequestError(f"{what} must be JSON ({why})") from None
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be a JSON object (got a {type(value).__name__})")
    return value
