"""`selfspec chat`: turns, what is not read again, commands, questions, and ways to leave."""

import io
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from selfspec import SelfSpec, SpecConfig
from selfspec.cli.chat import ChatLoop, Conversation, _reader
from selfspec.cli.messages import harmless
from selfspec.cli.options import WriteOptions
from selfspec.errors import CliError
from selfspec.serving.fields import RequestError

QUESTIONS = ("the quick brown fox", "read a file", "dog")


def begin(writer, show=lambda _piece: None, **knobs) -> Conversation:
    """A conversation, on a screen that nobody looks at if none is given."""
    return Conversation(writer, SelfSpec(**knobs), show)


@pytest.fixture(autouse=True)
def short_ones_count(monkeypatch):
    monkeypatch.setattr("selfspec.kept_kv.LEAST", 3)


@pytest.fixture
def chat(run, chat_folder):
    command = ("chat", chat_folder, "--max-new-tokens", "16")
    return lambda *lines, args=(): run(*command, *args, stdin="\n".join([*lines, ""])).stdout


@pytest.fixture
def stock_answers(stock_text):
    """What stock says to each question, with nothing kept from turn to turn."""

    def answers(*questions: str, system: str = "") -> list[str]:
        messages = [{"role": "system", "content": system}] if system else []
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": stock_text(messages, 16)})
        return [m["content"] for m in messages if m["role"] == "assistant"]

    return answers


@pytest.fixture
def writer(writer):
    return replace(writer, options=WriteOptions(seed=0, max_new_tokens=16))


def kept_after(conversation, question) -> int:
    """The tokens that were not read again for a question."""
    conversation.ask(question)
    return conversation._spec.stats.num_prompt_tokens_kept


def contents(conversation):
    return [message["content"] for message in conversation.messages]


def test_two_turns_are_stocks(chat, stock_answers):
    out = chat(*QUESTIONS[:2], "/stats", args=["--system", "be a fox"])
    answers = stock_answers(*QUESTIONS[:2], system="be a fox")
    for question, answer in zip(QUESTIONS, answers, strict=False):
        assert f"> {question}\n{harmless(answer)}\n" in out
    for said in ("(16 tokens, ", " a second, cut off)", "tokens per step"):
        assert said in out
    assert "\x1b" not in out


@pytest.mark.parametrize("kept_kv", ["1GB", 0])
def test_with_and_without_reuse_the_same_text(writer, stock_answers, kept_kv):
    conversation = begin(writer, kept_kv=kept_kv)
    num_kept = [kept_after(conversation, question) for question in QUESTIONS]
    assert [n > 0 for n in num_kept] == [False, bool(kept_kv), bool(kept_kv)]
    assert contents(conversation)[1::2] == stock_answers(*QUESTIONS)


def test_a_history_that_changed_is_read_from_where_it_differs(writer, stock_text):
    conversation = begin(writer, kept_kv="1GB")
    conversation.ask(QUESTIONS[0])
    conversation.messages[-1]["content"] = "cat"
    assert kept_after(conversation, QUESTIONS[1]) > 0
    prompt = f"<|user|>{QUESTIONS[0]}<|assistant|>cat<|eos|><|user|>{QUESTIONS[1]}<|assistant|>"
    assert contents(conversation)[-1] == stock_text(prompt, 16)


def test_ctrl_c_keeps_what_was_shown_and_the_next_turn_is_right(writer, stock_text):
    pieces = []

    def show(piece):
        pieces.append(piece)
        if len(pieces) == 4:
            raise KeyboardInterrupt

    conversation = begin(writer, show, kept_kv="1GB")
    assert conversation.ask(QUESTIONS[0]) == "interrupted"
    assert contents(conversation) == [QUESTIONS[0], "".join(pieces)]
    messages = [*conversation.messages, {"role": "user", "content": QUESTIONS[1]}]
    assert kept_after(conversation, QUESTIONS[1]) == 0
    assert contents(conversation)[-1] == stock_text(messages, 16)


def test_a_full_context_is_an_error_that_leaves_the_chat_running(writer):
    conversation = begin(writer)
    with pytest.raises(CliError, match="/reset"):
        conversation.ask("dog " * 600)
    assert conversation.messages == []
    conversation.ask("!" * 502)  # with the template's tokens 504 of 512


def test_commands(chat, stock_answers):
    asked = (QUESTIONS[1], "/reset", QUESTIONS[0])
    out = chat("", "/help", "/res", *asked, "/quit", "dog")
    (first,), (second,) = stock_answers(QUESTIONS[1]), stock_answers(QUESTIONS[0])
    for said in (
        "/reset  forget",
        "did you mean '/reset'?",
        f"> {QUESTIONS[1]}\n{harmless(first)}\n",
        f"> {QUESTIONS[0]}\n{harmless(second)}\n",
    ):
        assert said in out
    assert "> dog" not in out


def test_what_is_no_utf_8_ends_no_chat(writer, monkeypatch, capsys):
    data = io.BytesIO(b"\xff fox\n/exit\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, encoding="utf-8"))
    ChatLoop(writer, SpecConfig()).run(_reader())
    assert "> \ufffd fox\n" in capsys.readouterr().out
    with pytest.raises(RequestError, match="can't be made into tokens"):
        begin(writer).ask("\udcff")


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(writer, monkeypatch, capsys):
    monkeypatch.setattr(writer.model, "generate", Mock(side_effect=KeyboardInterrupt))
    typed = Mock(side_effect=[KeyboardInterrupt, QUESTIONS[0], EOFError])
    ChatLoop(writer, SpecConfig()).run(typed)
    out = capsys.readouterr().out
    assert "(Ctrl-D or /exit leaves)" in out
    assert "(stopped; the conversation continues from here)" in out


@pytest.mark.parametrize(
    ("keys", "questions"),
    [
        (["one\x1b\rtwo\r", "\x1b[A!\r"], ["one\ntwo", "one\ntwo!"]),  # Alt-Enter, the up key
        (["\x1b[200~one\rtwo\r\nthree\x1b[201~!\r"], ["one\ntwo\nthree!"]),  # a paste
    ],
)
def test_questions_typed_at_a_terminal(monkeypatch, keys, questions):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        read, found = _reader(), []
        for text in keys:
            pipe.send_text(text)
            found.append(read())
    assert found == questions


def test_a_template_that_takes_no_system_message(writer):
    writer.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(RequestError, match="System role not supported"):
        Conversation(writer, SelfSpec(), print, system="be kind")
