"""From the body of a request to what is asked of `generate()`; runs no model.

Which fields there are, what each may be, and which ones are refused with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec.serving.fields import Fields, checked_text
from selfspec.serving.inputs import MAX_CHOICES, messages_of, prediction_of, prompts_of
from selfspec.serving.refusal import Refused

# transformers compares every token with each place of each stop string. Longer ones take seconds.
_MAX_STOPS, _MAX_STOP_LENGTH = 4, 32
_MAX_BIASES = 1024
_LEAST_TEMPERATURE = 0.001  # A smaller one divides by what float32 may take for zero.
_DEFAULT_TOKENS = 1024  # Of an answer, if the request doesn't say.
_ENDLESS = 1 << 20  # The most tokens where a model has no positions that could run out.

# The values of a field that are let through, and what is said about others.
_Refused = dict[str, tuple[list[Any], str]]
_NOT_HERE = "is not supported by this server; leave it out"
_REFUSED: _Refused = dict.fromkeys(
    ("frequency_penalty", "presence_penalty"),
    ([0], "must be 0: no such penalty is here; repetition_penalty is another"),
)
_REFUSED_IN_CHATS: _Refused = {
    **_REFUSED,
    **dict.fromkeys(("audio", "functions", "function_call"), ([[], "none"], _NOT_HERE)),
    **dict.fromkeys(("tools", "tool_choice"), ([[], "none"], _NOT_HERE)),
    **dict.fromkeys(("reasoning_effort", "verbosity", "web_search_options"), ([], _NOT_HERE)),
    "modalities": ([["text"]], "must be ['text']"),
    "response_format": ([{"type": "text"}], "must be {'type': 'text'}"),
    "logprobs": ([False], _NOT_HERE),
    "top_logprobs": ([0], _NOT_HERE),
    "store": ([False], "must be false, since nothing is stored"),
}
_REFUSED_IN_COMPLETIONS: _Refused = {
    **_REFUSED,
    "logprobs": ([], _NOT_HERE),
    "echo": ([False], _NOT_HERE),
    "suffix": ([""], _NOT_HERE),
}
_SHARED = (
    *("model", "user", "n", "seed", "stop", "stream", "stream_options", "prediction", "max_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
)
_OF_CHATS = (
    *_SHARED,
    *_REFUSED_IN_CHATS,
    *("messages", "max_completion_tokens", "metadata", "parallel_tool_calls"),
    *("prompt_cache_key", "safety_identifier", "service_tier"),
)
_OF_COMPLETIONS = (*_SHARED, *_REFUSED_IN_COMPLETIONS, "best_of", "prompt")


@dataclass(frozen=True)
class Rules:
    """What the model allows."""

    model: str  # its name in requests
    vocab_size: int
    max_positions: int | None


@dataclass(frozen=True)
class Asked:
    """A request that was checked, as far as that needs no tokens."""

    prompts: list[Any]  # Texts, messages or token ids.
    max_tokens: int | None
    arguments: dict[str, Any]  # of `generate()`
    num_choices: int  # for each prompt
    seed: int | None
    stops: tuple[str, ...]
    prediction: str | None
    streams: bool
    tells_usage: bool
    max_tokens_field: str

    def num_new_tokens(self, num_ids: int, rules: Rules) -> int:
        """How long the answer to a prompt of `num_ids` tokens may be; refuses what can't fit."""
        limit = rules.max_positions
        if limit is None:
            return _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        room = limit - num_ids
        wanted = min(_DEFAULT_TOKENS, max(room, 1)) if self.max_tokens is None else self.max_tokens
        if wanted > room:
            raise Refused(
                f"prompt and answer must fit into the model's {limit} positions (got {num_ids} + "
                f"{wanted} tokens); shorten the prompt, or lower {self.max_tokens_field}",
                field=self.max_tokens_field if room > 0 else None,
                code="context_length_exceeded",
            )
        return wanted


def read_chat(body: Any, rules: Rules) -> Asked:
    """What a chat completion asks for."""
    fields = Fields(body, _OF_CHATS, _REFUSED_IN_CHATS)
    fields.flag("parallel_tool_calls")
    for name in ("prompt_cache_key", "safety_identifier", "service_tier"):
        fields.text(name)
    if not isinstance(fields.get("metadata") or {}, dict):
        raise fields.refuse("metadata", "an object")
    return _read(fields, rules, [messages_of(fields)])


def read_completion(body: Any, rules: Rules) -> Asked:
    """What a completion asks for."""
    fields = Fields(body, _OF_COMPLETIONS, _REFUSED_IN_COMPLETIONS)
    fields.only("best_of", [fields.get("n") or 1], "must be n: the best ones are not chosen")
    return _read(fields, rules, prompts_of(fields, rules.vocab_size))


def _read(fields: Fields, rules: Rules, prompts: list[Any]) -> Asked:
    _check_model(fields, rules)
    fields.text("user")
    streams = fields.flag("stream")
    field, max_tokens = _max_tokens(fields, rules)
    stops = _stops(fields)
    num_choices = fields.whole("n", 1, MAX_CHOICES) or 1
    if num_choices * len(prompts) > MAX_CHOICES:
        raise Refused(
            f"n times the number of prompts must be <= {MAX_CHOICES} "
            f"(got {num_choices} times {len(prompts)})",
            field="n",
        )
    return Asked(
        prompts,
        max_tokens,
        _arguments(fields, rules, stops),
        num_choices,
        fields.whole("seed", 0, 2**63 - MAX_CHOICES - 1),
        stops,
        prediction_of(fields),
        streams,
        _tells_usage(fields, streams),
        field,
    )


def _check_model(fields: Fields, rules: Rules) -> None:
    name = fields.text("model")
    if name != rules.model:
        given = "no model" if name is None else f"{name!r:.80}"
        raise Refused(
            f"model must be {rules.model!r}, the one that this server answers with (got {given})",
            field="model",
            status=400 if name is None else 404,
            code="model_not_found",
        )


def _max_tokens(fields: Fields, rules: Rules) -> tuple[str, int | None]:
    """The field that says how long an answer may be, and its value."""
    most = rules.max_positions or _ENDLESS
    both = {
        name: value
        for name in ("max_tokens", "max_completion_tokens")
        if (value := fields.whole(name, 1, most)) is not None
    }
    if len(set(both.values())) > 1:
        raise fields.refuse("max_completion_tokens", "equal to max_tokens where both are given")
    return next(iter(both.items()), ("max_tokens", None))


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.get("stop")
    if given is None:
        return ()
    stops = given if isinstance(given, list) else [given]
    rule = f"text, or a list of 1 to {_MAX_STOPS} texts of 1 to {_MAX_STOP_LENGTH} characters"
    if not 1 <= len(stops) <= _MAX_STOPS:
        raise fields.refuse("stop", rule)
    for each in stops:
        if not isinstance(each, str) or not 1 <= len(each) <= _MAX_STOP_LENGTH:
            raise fields.refuse("stop", rule)
        checked_text("stop", each)
    return tuple(dict.fromkeys(stops))


def _arguments(fields: Fields, rules: Rules, stops: tuple[str, ...]) -> dict[str, Any]:
    """How tokens are chosen, as arguments of `generate()`; what is left out is the model's own."""
    arguments: dict[str, Any] = {}
    temperature = fields.number("temperature", 0, 2)
    if temperature is not None and 0 < temperature < _LEAST_TEMPERATURE:
        raise fields.refuse("temperature", f"0, or a number from {_LEAST_TEMPERATURE} to 2")
    if temperature is not None:
        arguments["do_sample"] = temperature > 0
        if temperature > 0:
            arguments["temperature"] = temperature
    others = {
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", 0, rules.vocab_size),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
    }
    arguments |= {name: value for name, value in others.items() if value is not None}
    biases = fields.biases("logit_bias", rules.vocab_size, _MAX_BIASES)
    if biases:
        arguments["sequence_bias"] = {(token,): bias for token, bias in biases.items()}
    if stops:
        arguments["stop_strings"] = list(stops)
    return arguments


def _tells_usage(fields: Fields, streams: bool) -> bool:
    given = fields.get("stream_options")
    if given is None:
        return not streams
    rule = "an object with include_usage, true or false, beside stream: true"
    if not streams or not isinstance(given, dict) or set(given) - {"include_usage"}:
        raise fields.refuse("stream_options", rule)
    if not isinstance(given.get("include_usage", False), bool):
        raise fields.refuse("stream_options", rule)
    return bool(given.get("include_usage"))
