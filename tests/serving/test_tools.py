"""Text is free where functions may be called, and calls are told from it, in each model's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from openai import OpenAI
from transformers import LogitsProcessorList

from selfspec import SelfSpec
from selfspec.batch import generate_many
from selfspec.batch.calls import CallReader, form_of, grammar_of
from selfspec.batch.guides import Guides
from selfspec.serving.fields import checked
from selfspec.serving.replies import Piece, joined
from selfspec.serving.schema import Chat
from tests.serving.conftest import CHAT, MESSAGES, NAME, Served
from tests.serving.test_schemas import WEATHER
from tests.sessions import alone
from tests.tiny import make_model, make_tokenizer

pytest.importorskip("llguidance", reason="needs the extra: pip install '.[grammar]'")

_SHOWN = (
    "{% if tools %}<|system|>@{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Family(NamedTuple):
    """What a family's template says of calls, and the tokens that it has for them."""

    says: str
    tokens: tuple[str, ...] = ()
    special: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        return _SHOWN.replace("@", self.says)


FAMILIES = {
    "qwen3": Family(
        'Call within <tool_call></tool_call>: {"name": <name>, "arguments": <object>}',
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "hermes": Family("Return {'arguments': <object>, 'name': <name>} inside <tool_call>"),
    "mistral": Family("[TOOL_CALLS]", special=("[AVAILABLE_TOOLS]", "[TOOL_CALLS]")),
    "llama3": Family(
        'Respond in the format {"name": name, "parameters": dictionary}',
        special=("<|python_tag|>", "<|eom_id|>"),
    ),
    "unknown": Family("You have tools."),
}

OTHER = {"type": "function", "function": {"name": "time"}}
ROME, PARIS = '{"city": "Rome", "days": 1}', '{"city": "Paris", "days": 2}'


def written(family: str, *arguments: str) -> str:
    """Calls as the models of a family write them; those of Llama 3 write one at a time."""
    key = "parameters" if family == "llama3" else "arguments"
    calls = [f'{{"name": "weather", "{key}": {each}}}' for each in arguments]
    if family == "mistral":
        return f"[TOOL_CALLS] [{', '.join(calls)}]"
    if family == "llama3":
        return calls[0]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


CASES = {
    "text": ("It is sunny.\n", "It is sunny.\n", []),
    "thoughts": ('<think>\na "b{\n</think>\n\nHi', '<think>\na "b{\n</think>\n\nHi', []),
    "HTML": ("<b>sunny</b> <tool", "<b>sunny</b> <tool", []),
    "JSON": ('{"name": "Ann", "arguments": []}', '{"name": "Ann", "arguments": []}', []),
    "a list": ('[\n {"name": "weather"}]', '[\n {"name": "weather"}]', []),
    "a call": ("@1", None, [ROME]),
    "two calls": ("@2", None, [ROME, PARIS]),
    "a call after text": ("Let me look.\n@1", "Let me look.\n", [ROME]),
    "a call after thoughts": (
        "<think>\nhm\n</think>\n\n@1",
        "<think>\nhm\n</think>\n\n",
        [ROME],
    ),
    "text after a call": ("a\n@1\nb", "a\n\nb", [ROME]),
}


def script_of(family: str, case: str) -> str:
    text = CASES[case][0]
    if family == "llama3" and not text.startswith("@"):
        text = text.replace("@", "<|python_tag|>@")
    return text.replace("@1", written(family, ROME)).replace("@2", written(family, ROME, PARIS))


class Steering:
    """Makes the tokens of a script likely at their places, and the text's end after them."""

    is_row_wise = True

    def __init__(self, num_prompt: int, script: list[int], by: float = 1e4) -> None:
        self._num_prompt, self._script, self._by = num_prompt, [*script, 1], by

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(input_ids.shape[1] - self._num_prompt, len(self._script) - 1)
        scores = scores.clone()
        scores[:, self._script[place]] += self._by
        return scores


class Steered(Served):
    """A model of a family that writes what it is told to."""

    script = ""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, max_positions=2048)

    def extra(self, prompt: Any) -> dict[str, Any]:
        script = self.tokenizer.encode(self.script, add_special_tokens=False)
        return {"logits_processor": [Steering(len(prompt), script)]}


# Their forms are two of the others': the same tags, and JSON without the special token.
_LIKE_OTHERS = ("hermes", "unknown")
_BY_DEFAULT = [
    pytest.param(name, marks=pytest.mark.slow if name in _LIKE_OTHERS else ()) for name in FAMILIES
]


@pytest.fixture(scope="module", params=_BY_DEFAULT)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    kind, tokenizer = FAMILIES[family], make_tokenizer(*2 * [written(family, ROME, PARIS)])
    tokenizer.add_tokens(list(kind.tokens))
    tokenizer.add_tokens(list(kind.special), special_tokens=True)
    tokenizer.chat_template = kind.template
    path = str(tmp_path_factory.mktemp(family))
    tokenizer.save_pretrained(path)
    make_model(len(tokenizer), max_position_embeddings=2048).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def steered(folder: str) -> Iterator[Steered]:
    served = Steered(folder)
    served.thread.start()
    with served.client:
        yield served


@pytest.fixture
def asked(steered: Steered) -> Any:
    """Lets a script be written, whole and in pieces; returns its content, calls and end."""
    client = OpenAI(base_url="http://localhost/v1", api_key="none", http_client=steered.client)

    def ask(
        script: str, *, in_file: bool = False, **more: Any
    ) -> tuple[str | None, list[str], str]:
        steered.script = script
        body = {"model": NAME, "messages": MESSAGES, "max_tokens": 400, "temperature": 0, **more}
        body = {"tools": [OTHER, WEATHER], **body}
        whole = client.chat.completions.create(**body).choices[0]
        calls = whole.message.tool_calls or []
        assert all(call.function.name == "weather" for call in calls)
        with client.chat.completions.stream(**body) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert (streamed.message.content or None) == (whole.message.content or None)
        assert streamed.finish_reason == whole.finish_reason
        arguments = [call.function.arguments for call in calls]
        assert [call.function.arguments for call in streamed.message.tool_calls or []] == arguments
        if in_file:
            (line,) = steered.choices_in_file(body)
            assert line["finish_reason"] == whole.finish_reason
            calls_of_line = line["message"]["tool_calls"]
            assert [call["function"]["arguments"] for call in calls_of_line] == arguments
        return whole.message.content, arguments, whole.finish_reason

    return ask


def can_write(family: str, case: str) -> bool:
    return family != "llama3" or case not in ("two calls", "text after a call")


# A server's reader is fed in pieces with all of them below.
@pytest.mark.parametrize("case", ["thoughts", "HTML", "JSON", "a list", "two calls"])
def test_text_is_free_and_calls_are_told_from_it(family: str, case: str, asked: Any) -> None:
    if not can_write(family, case):
        pytest.skip("a call ends the answer")
    _, content, calls = CASES[case]
    end = "tool_calls" if calls else "stop"
    assert asked(script_of(family, case)) == (content, calls, end)


def test_what_follows_a_tag_keeps_to_the_schema(family: str, asked: Any) -> None:
    content, (arguments, *_), _ = asked(written(family, '{"city": "Oslo"}'))
    assert content is None
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_one_call_alone(family: str, asked: Any) -> None:
    one = {"parallel_tool_calls": False}
    assert asked(written(family, ROME, PARIS), **one) == (None, [ROME], "tool_calls")
    assert asked(script_of(family, "a call after text"), **one)[1] == [ROME]
    assert asked("<b>sunny</b> <tool", **one) == ("<b>sunny</b> <tool", [], "stop")


@pytest.mark.parametrize("stop", ["}", "weather"])
def test_a_stop_string_waits_until_a_call_has_ended(family: str, asked: Any, stop: str) -> None:
    """Calls hold no text that a user reads. After a call, stop strings end the text as ever."""
    script, is_last = script_of(family, "a call after text"), family == "llama3"
    content, calls, end = asked(f"{script}\nIt {stop} ends", stop=[stop])
    after = "" if is_last else "\nIt "
    assert (content, calls, end) == (f"Let me look.\n{after}", [ROME], "tool_calls")
    assert asked(f"It {stop} ends\n{written(family, ROME)}", stop=stop) == ("It ", [], "stop")


def test_calls_that_are_required(family: str, asked: Any) -> None:
    two = written(family, ROME, PARIS)
    required = {"tool_choice": "required", "in_file": True}
    calls = [ROME] if family == "llama3" else [ROME, PARIS]
    assert asked(two, **required) == (None, calls, "tool_calls")
    named = {"type": "function", "function": {"name": "weather"}}
    content, calls, _ = asked("It is sunny.", tool_choice=named, parallel_tool_calls=False)
    assert (content, len(calls)) == (None, 1)
    assert asked(two, tool_choice="none")[1:] == ([], "stop")


@pytest.mark.parametrize("parameters", [{"properties": {"city": {"enum": ["Rome"]}}}, None])
def test_parameters_need_no_type(asked: Any, family: str, parameters: Any) -> None:
    """An object is all that they may be."""
    tool = {"type": "function", "function": {**WEATHER["function"], "parameters": parameters}}
    content, (arguments,), _ = asked(written(family, '{"city": "Rome"}'), tools=[tool])
    assert (content, json.loads(arguments)) == (None, {"city": "Rome"})


@pytest.mark.parametrize("case", ["text after a call", "two calls", "a call after text"])
def test_items_of_a_response_are_in_their_order(family: str, steered: Steered, case: str) -> None:
    """In a stream, whole and in a file, wherever they are cut, with the scores of their text."""
    if not can_write(family, case):
        pytest.skip("a call ends the answer")
    steered.script = script_of(family, case)
    tools = [{"type": "function", **tool["function"]} for tool in (OTHER, WEATHER)]
    asked = {"input": "the fox", "tools": tools, "temperature": 0, "top_logprobs": 1}
    asked["include"] = ["message.output_text.logprobs"]
    num_tokens = len(steered.tokenizer.encode(steered.script, add_special_tokens=False))
    for length in [*range(1, num_tokens, 17), num_tokens, num_tokens + 1]:
        body = {**asked, "max_output_tokens": length}
        whole = steered.ask("/v1/responses", **body)
        lines = steered.post("/v1/responses", {**body, "stream": True}).text.splitlines()
        streamed = json.loads(lines[-2].removeprefix("data: "))["response"]
        items = items_of(whole)
        assert items == items_of(streamed) == items_of(steered.in_file(body))
        for item in items[:-1]:
            assert item["status"] == "completed"
    _, content, calls = CASES[case]
    texts = ["a\n", "\nb"] if case == "text after a call" else [content] if content else []
    said = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    assert said == texts
    assert [item["arguments"] for item in items if item["type"] != "message"] == calls
    if case == "text after a call":
        assert [item["type"] for item in items] == ["message", "function_call", "message"]
    for item in items:
        if item["type"] == "message":
            scores = item["content"][0]["logprobs"]
            tokens = [score["token"] for score in scores if score["token"] != "<|eos|>"]
            assert "".join(tokens) == item["content"][0]["text"]
            assert all(isinstance(score["bytes"], list) for score in scores)


def items_of(response: Any) -> list[Any]:
    """The output, without names that are drawn, and without digits that the shape decides."""
    items = [dict.fromkeys(("id", "call_id"), "") for _ in response["output"]]
    for item, of_response in zip(items, response["output"], strict=True):
        item.update({**of_response, **item})
        for part in item.get("content", ()):
            for score in part["logprobs"]:
                del score["logprob"], score["top_logprobs"]
    return items


def test_a_call_that_is_cut_in_its_head_ends_by_its_length(family: str, steered: Steered) -> None:
    """What may only be a call is not searched for stop strings, as in calls that are whole."""
    steered.script = written(family, ROME)
    asked = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}
    for length in (2, 6, 9):
        (choice,) = steered.ask(CHAT, **asked, max_tokens=length, stop=["e", "<", "["])["choices"]
        assert choice["finish_reason"] == "length"
        assert steered.script.startswith(choice["message"]["content"])


@pytest.mark.parametrize("family", ["llama3"], indirect=True)
@pytest.mark.parametrize("before", ["Write ", "So:\n", " "])
def test_without_a_tag_json_after_the_beginning_is_text(
    family: str, asked: Any, before: str
) -> None:
    text = f"{before}{written(family, ROME)} or [{written(family, PARIS)}]."
    assert asked(text) == (text, [], "stop")


def test_texts_are_those_of_generate_with_the_same_processors(
    family: str, steered: Steered
) -> None:
    """Sampled texts leave the script here and there, inside and outside of calls."""
    model, tokenizer = steered.model, steered.tokenizer
    chat = checked(Chat, {"messages": MESSAGES, "tools": [OTHER, WEATHER]})
    functions = {each.function.name: each.function.parameters for each in chat.callable_tools}
    guide = grammar_of(functions, tokenizer, must_call=False, is_single=False)
    guides = Guides(tokenizer, model)
    script = tokenizer.encode(script_of(family, "two calls"), add_special_tokens=False)
    ids = tokenizer.encode("the quick brown fox")
    options: dict[str, Any] = {"max_new_tokens": len(script) + 8, "do_sample": True}
    spec = SelfSpec(max_nodes=8, budget="fixed")
    for seed, by in enumerate((8.0, 16.0)):
        steering = Steering(len(ids), script, by)
        processors = LogitsProcessorList([steering, guides.processor(guide)])
        expected = alone(model, ids, seed, logits_processor=processors, **options)
        options_of_many = {"schema": guide, "seed": seed, "logits_processor": [steering], **options}
        (answer,) = generate_many(model, tokenizer, [ids], assistant=spec, **options_of_many)
        assert answer.ids == expected
    assert spec.total_stats.accepted_by_source["grammar"] > 0


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("case", CASES)
def test_calls_are_read_in_pieces_of_any_size(case: str, size: int) -> None:
    for name, kind in FAMILIES.items():
        if not can_write(name, case):
            continue
        text, (_, content, calls) = script_of(name, case), CASES[case]
        reader = CallReader(form_of(kind.template), ["time", "weather"])
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parts = [piece_of(part) for piece in pieces for part in reader.add(piece)]
        whole = joined([Piece(0, ""), *parts])
        assert whole.text + reader.end() == (content or "")
        assert [call["function"]["arguments"] for call in whole.calls] == calls


def piece_of(part: Any) -> Piece:
    return Piece(0, part) if isinstance(part, str) else Piece(0, "", calls=[part])


def test_a_text_that_is_cut_is_whole_as_far_as_it_came() -> None:
    form = form_of(FAMILIES["qwen3"].template)
    for text, expected in [("a <tool_c", "a <tool_c"), (" \n", " \n"), ("<tool_call>\n{", None)]:
        reader = CallReader(form, ["weather"])
        other = "".join(map(str, reader.add(text))) + reader.end()
        assert other == (text if expected is None else expected)
    reader = CallReader(form, ["weather"])
    reader.add(written("qwen3", ROME)[:-3])
    assert reader.end() == ""
