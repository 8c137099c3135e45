"""How an answer is written: the fields that requests and the lines of prompt files share.

This module runs no model and knows nothing of HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from selfspec.serving.fields import Fields
from selfspec.serving.messages import FilledText, Name

MAX_CHOICES = 16  # Answers to one request.
_LEAST_TEMPERATURE = 0.001  # A smaller one means 0: the likeliest token.
MOST_TOKENS = 1 << 20  # What the model's positions allow is checked when the prompt is encoded.
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")  # The first one counts.

# Other servers take these values for none.
_MINUS_ONE = BeforeValidator(lambda value: None if value == -1 else value)
_ANY_TEXT = BeforeValidator(lambda value: None if value == {"type": "text"} else value)

Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Length = Annotated[Count | None, _MINUS_ONE]
Share = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[list[FilledText], Field(min_length=1, max_length=64)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Seed = Annotated[Annotated[int, Field(ge=0, lt=2**63 - MAX_CHOICES)] | None, _MINUS_ONE]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
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


class Settings(Fields):
    """How an answer is written. What is left out is as the command or the model has it."""

    max_tokens: Length = None
    max_completion_tokens: Length = None
    max_new_tokens: Length = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    seed: Seed = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    response_format: Annotated[ResponseFormat | None, _ANY_TEXT] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Names of vLLM.
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def length(self) -> tuple[str, int] | None:
        """The field that says how long the answer may be, and its value."""
        lengths = ((self.spelled(name), getattr(self, name)) for name in _LENGTHS)
        return next((length for length in lengths if length[1] is not None), None)

    @property
    def schema_field(self) -> str | None:
        """The field that says what an answer must be; None if any text will do."""
        return None if self.response_format is None else self.spelled("response_format")

    def arguments(self) -> dict[str, Any]:
        """How tokens are chosen, and how many at most, as arguments of `generate()`.

        Stop strings are not among them, since calls of tools may hold them.
        """
        same = {"top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
        arguments = self.model_dump(include=same, exclude_none=True)
        if self.length is not None:
            arguments["max_new_tokens"] = self.length[1]
        if self.temperature is not None:
            arguments |= choice_of(self.temperature)
        if self.top_k is not None:
            arguments["top_k"] = max(self.top_k, 0)
        if self.logit_bias:
            biases = {(int(token),): bias for token, bias in self.logit_bias.items()}
            arguments["sequence_bias"] = biases
        if self.response_format is not None:
            schema = self.response_format.json_schema
            arguments["schema"] = {"type": "object"} if schema is None else schema.schema_
        if self.min_tokens is not None:
            arguments["min_new_tokens"] = self.min_tokens
        return arguments


def choice_of(temperature: float) -> dict[str, Any]:
    """The arguments of `generate()` for a temperature; next to 0 means the likeliest token."""
    if temperature < _LEAST_TEMPERATURE:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature}
