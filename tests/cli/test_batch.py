"""`selfspec batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM

from selfspec import load
from selfspec.cli.options import WriteOptions
from selfspec.cli.writer import OTHER_TEXTS, TOKENS_A_TEXT, Writer
from selfspec.neural.rounded_copy import copy_bytes
from selfspec.serving.translator import PromptTranslator
from selfspec.weights.streamed.memory_plan import kv_bytes
from tests.cli.conftest import write_lines as write
from tests.streamed import saved_model

FEW = ("--max-new-tokens", "6", "--max-rows", "3")
PROMPTS = ["def read(self, size", "the quick brown", "class Queue", "x", "lazy dog over"]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def batch(run, chat_folder):
    return lambda *args: run("batch", chat_folder, *args, *FEW)


def test_three_forms_of_a_line(batch, tmp_path, stock_text):
    messages = [{"role": "user", "content": "the lazy fox"}]
    given = write(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": PROMPTS[0]},
        "",
        {"messages": messages, "max_new_tokens": 4},
        {"custom_id": "c", "body": {"messages": messages, "max_tokens": 3, "temperature": 0}},
        {"custom_id": "d", "body": {"prompt": "x", "model": "m", "temperature": 0.9, "seed": 5}},
    )
    result = batch(given, tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    assert "4/4" in result.stderr
    plain, chat, chat_body, text_body = sorted(
        read(tmp_path / "out.jsonl"), key=lambda a: a["line"]
    )
    expected = {"id": "a", "line": 1, "finish_reason": "length", "num_new_tokens": 6}
    assert plain.items() >= {**expected, "text": stock_text(PROMPTS[0], 6)}.items()
    assert len(plain["ids"]) == 6
    assert plain["stats"]["num_steps"] >= 1
    assert (chat["line"], chat["text"]) == (3, stock_text(messages, 4))
    body = chat_body["response"]["body"]
    assert chat_body["custom_id"] == "c"
    assert body["choices"][0]["message"]["content"] == stock_text(messages, 3)
    assert body["usage"]["completion_tokens"] == 3
    said = text_body["response"]["body"]["choices"][0]["text"]
    assert said == stock_text("x", 6, seed=5, do_sample=True, temperature=0.9)


def test_a_run_that_was_cut_off_goes_on(batch, tmp_path):
    given = write(tmp_path / "in.jsonl", *({"prompt": text} for text in PROMPTS))
    out = tmp_path / "out.jsonl"
    batch(given, out, "--temperature", "1", "--seed", "3")
    whole = {answer["line"]: answer["text"] for answer in read(out)}
    data = out.read_bytes()
    for length in random.Random(0).sample(range(len(data)), 2):
        out.write_bytes(data[:length])
        assert batch(given, out, "--temperature", "1", "--seed", "3").exit_code == 0
        answers = read(out)
        assert len(answers) == len(PROMPTS)
        assert {answer["line"]: answer["text"] for answer in answers} == whole
    done = batch(given, out)
    assert "All 5 lines are answered" in done.stderr
    assert "Loading" not in done.stderr


def test_answers_are_found_by_the_numbers_of_their_lines(batch, fails, tmp_path, chat_folder):
    lines = [{"id": 7, "prompt": "x"}, {"custom_id": "b", "body": {"prompt": "y"}}]
    given, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    batch(given, out)
    lines.append({"id": "new", "prompt": "z"})
    write(given, *lines)
    assert "3/3" in batch(given, out).stderr
    names = [each.get("id", each.get("custom_id")) for each in read(out)]
    assert set(names[:2]) == {7, "b"}
    assert names[2:] == ["new"]
    # Lines that are not those which were answered.
    for changed in ([{"id": 7, "prompt": "another"}, *lines[1:]], lines[::-1], lines[:2]):
        write(given, *changed)
        before = out.read_bytes()
        assert "an answer to" in fails("batch", chat_folder, given, out)
        assert out.read_bytes() == before


def test_bad_lines_are_told_and_the_rest_goes_on(batch, tmp_path):
    """Each of them ended the run once, or could have: no other line was answered."""
    wrong = {
        "[" * 100_000: "JSON",
        '{"id": "\\ud800", "prompt": "x"}': "JSON",
        '{"custom_id": "a", "body": {"prompt": "x", "n_best": 2}}': "n_best",
        json.dumps({"prompt": "x" * 600}): "600 + 6 tokens",
        '{"prompt": "x", "logit_bias": {"999999": 1}}': "logit_bias",
    }
    given = write(tmp_path / "in.jsonl", {"id": "good", "prompt": "x"}, *wrong)
    result = batch(given, tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert f"{len(wrong)} of {len(wrong) + 1} lines have no answer" in result.stderr
    assert [answer["line"] for answer in read(tmp_path / "out.jsonl")] == [1]
    errors = {each["line"]: each["error"] for each in read(tmp_path / "out.errors.jsonl")}
    for number, said in enumerate(wrong.values(), start=2):
        assert said in errors[number]["message"]
        assert errors[number]["code"]


def test_lines_whose_text_breaks_off(batch, tmp_path, stock_text, monkeypatch):
    """The others are answered; the next run tries these lines again, and no others."""

    class Broken:
        is_row_wise = True
        num_left = 3

        def __call__(self, ids, scores):
            self.num_left -= 1
            if not self.num_left:
                raise torch.OutOfMemoryError("on purpose")
            return scores

    def treacherous(self, prompt, settings):
        encoded, arguments = arguments_for(self, prompt, settings)
        return encoded, {**arguments, **({"logits_processor": [Broken()]} if prompt == "y" else {})}

    arguments_for = PromptTranslator.arguments_for
    lines = [{"id": text, "prompt": text} for text in PROMPTS]
    lines[1:1] = [{"custom_id": "b", "body": {"prompt": "y"}}, {"id": 3, "prompt": "y"}]
    given, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(PromptTranslator, "arguments_for", treacherous)
        for num_tokens in (6 * len(PROMPTS), 0):
            result = batch(given, out)
            assert result.exit_code == 1
            assert f" {num_tokens} tokens" in result.stderr
            answers = {each["id"]: each["text"] for each in read(out)}
            assert answers == {text: stock_text(text, 6) for text in PROMPTS}
            error = {"code": "OutOfMemoryError", "message": "on purpose"}
            assert sorted(read(tmp_path / "out.errors.jsonl"), key=lambda e: e["line"]) == [
                {"line": number, "custom_id": name, "response": None, "error": error}
                for number, name in ((2, "b"), (3, 3))
            ]
    assert batch(given, out).exit_code == 0
    assert len(read(out)) == 7
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_files_that_can_not_be(batch, fails, tmp_path, chat_folder):
    """Nothing is changed, and no model is loaded. Reading from some of them would never end."""
    given = write(tmp_path / "in.jsonl", {"prompt": "x"})
    other = tmp_path / "notes.txt"
    other.write_text('{"line": my own, with no end of a line')
    errors = write(tmp_path / "mine.errors.jsonl", "something else")
    old = write(tmp_path / "old.jsonl", {"line": 1, "input": "0" * 12})
    os.mkfifo(tmp_path / "pipe")
    before = [path.read_bytes() for path in (other, old, errors)]
    for asked, answers, said in (
        (tmp_path / "none.jsonl", tmp_path / "out.jsonl", "INPUT"),
        (given, tmp_path / "none" / "out.jsonl", "OUTPUT"),
        (given, tmp_path / "pipe", "OUTPUT"),
        (given, Path(os.devnull), "OUTPUT"),
        (given, Path("."), "OUTPUT"),
        (given, given, "OUTPUT"),
        (given, other, "no answer to this INPUT"),
        (given, tmp_path / "mine.jsonl", "mine.errors.jsonl'"),
        (given, old, "another line 1"),
        (given, Path("/proc/out.jsonl"), "OUTPUT"),
        (write(tmp_path / "empty.jsonl", ""), tmp_path / "o.jsonl", "INPUT"),
    ):
        assert said in fails("batch", chat_folder, asked, answers)
        assert before == [path.read_bytes() for path in (other, old, errors)]
    result = batch(write(given, "nonsense"), tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert "Loading" not in result.stderr


def test_what_is_no_output_of_ours_stays(fails, tmp_path, chat_folder):
    """An input that begins as our lines do, by any name, and what looks like a torn line."""
    line = {"line": 1, "prompt": "x"}
    given = write(tmp_path / "q.errors.jsonl", line)
    os.link(given, tmp_path / "linked.errors.jsonl")
    (tmp_path / "far.errors.jsonl").symlink_to(given)
    write(tmp_path / "mine.errors.jsonl", {"line": 2, "prompt": "y"})
    torn = tmp_path / "torn.jsonl"
    torn.write_text(json.dumps(line))
    for number in (None, "b", 1.5, True):
        write(tmp_path / f"{number}.jsonl", {"line": number, "input": "0" * 12})
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for output, said in (
        ("q.jsonl", "three files"),
        ("linked.jsonl", "three files"),
        ("far.jsonl", "three files"),
        ("mine.jsonl", "move it"),
        ("torn.jsonl", "no answer to this INPUT"),
        ("None.jsonl", "no answer to this INPUT"),
        ("b.jsonl", "no answer to this INPUT"),
        ("1.5.jsonl", "no answer to this INPUT"),
        ("True.jsonl", "no answer to this INPUT"),
    ):
        assert said in fails("batch", chat_folder, given, tmp_path / output), output
        assert {path: path.read_bytes() for path in files} == files


def test_a_lock_that_can_not_be_made_is_no_other_run(fails, tmp_path, chat_folder):
    """The reason is the system's, also where filelock says that the lock is taken."""
    given, out = write(tmp_path / "in.jsonl", {"prompt": "x"}), tmp_path / "out.jsonl"
    said = fails("batch", chat_folder, given, "/proc/out.jsonl")
    assert "another run" not in said
    assert "No such file" in said
    with FileLock(tmp_path / ".out.jsonl.lock"):
        assert "another run is writing" in fails("batch", chat_folder, given, out)


def memory_left(model, draft_model=None) -> int:
    """What three texts may take of a gigabyte."""
    writer = Writer(WriteOptions(max_memory="1GB"), model, None, draft_model=draft_model)
    return writer.memory_of_texts(3)


def test_within_a_memory(batch, tmp_path, stock_text, writer):
    given = write(tmp_path / "in.jsonl", *({"prompt": text} for text in PROMPTS))
    result = batch(given, tmp_path / "out.jsonl", "--max-memory", "3MB", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    for answer in read(tmp_path / "out.jsonl"):
        assert answer["text"] == stock_text(PROMPTS[answer["line"] - 1], 6)
    model = writer.model  # A draft model takes its part of the memory.
    alone, beside = (memory_left(model, small) for small in (None, model))
    assert alone - memory_left(model, "int8") == copy_bytes(model, "int8")
    weights = sum(each.nbytes for each in model.parameters())
    assert alone - beside == weights + kv_bytes(model, TOKENS_A_TEXT * (3 + OTHER_TEXTS))


def test_rounded_weights_are_counted_as_such(tmp_path):
    """One byte for each number, and not the four of the dtype that they are computed in."""
    saved_model(tmp_path, hidden_size=64)
    rounded = load(str(tmp_path), weights="int8")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    left, less = (memory_left(model) for model in (rounded, whole))
    weights = sum(each.nbytes for each in whole.parameters())
    assert 0.6 * weights < left - less < 0.75 * weights
