"""`selfspec generate`: continuations through pipes and files."""

import gc
import os
import re
import sys

import pytest

from selfspec.cache import save_cache
from selfspec.cli import app
from tests.caches import contents

PROMPT = "def read(self, size"
FEW = ("--max-new-tokens", "24")


@pytest.fixture
def generate(run, plain_folder):
    return lambda *args, stdin=PROMPT: run("generate", plain_folder, *args, *FEW, stdin=stdin)


def test_from_stdin_a_file_or_the_command_line(generate, stock_text, plain_folder, tmp_path):
    result = generate()
    assert result.exit_code == 0
    assert result.stdout == stock_text(PROMPT, 24)
    assert result.stderr == f"Loading {plain_folder} ...\n"
    assert generate("--prompt", "the fox", stdin="").stdout == stock_text("the fox", 24)
    (tmp_path / "prompt.txt").write_text("the quick brown", encoding="utf-8-sig")
    result = generate(tmp_path / "prompt.txt", stdin="")
    assert result.stdout == stock_text("the quick brown", 24)


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_the_model_drafts_for_itself(generate, stock_text, bits):
    result = generate("--draft-model", bits, "--stats")
    assert result.stdout == stock_text(PROMPT, 24)
    assert "forwards for drafts" in result.stderr


def test_a_question(run, fails, stock_text, chat_folder, plain_folder):
    text = stock_text([{"role": "user", "content": "the fox"}], 24)
    asked = ("--chat", "--prompt", "the fox")
    assert run("generate", chat_folder, *FEW, *asked).stdout == text
    assert repr(plain_folder) in fails("generate", plain_folder, *asked)


def test_sampling_is_stocks_with_the_same_seed_and_another_one_without(generate, stock_text):
    result = generate("--temperature", "0.9", "--seed", "7", "--stats")
    assert result.stdout == stock_text(PROMPT, 24, seed=7, do_sample=True, temperature=0.9)
    assert "\n\n24 new tokens in" in result.stderr  # The text may end in the middle of a line.
    assert len({generate("--temperature", "2").stdout for _ in range(3)}) > 1


def test_wrong_prompts_and_files(fails, plain_folder, tmp_path):
    wrong = tmp_path / "latin.txt"
    wrong.write_bytes(b"ab\xff")
    (tmp_path / "16.txt").write_text("the quick", encoding="utf-16")
    for args, stdin, said in (
        ((), "", "prompt"),
        ((), b"ab\xff", "FILE"),
        (("a", "--prompt", "b"), "", "--prompt"),
        (("def main():",), "", "FILE"),
        (("",), "", "FILE must be a file"),
        (("--prediction", ""), PROMPT, "--prediction must be a file"),
        (("--seed", "12345678901234567890"), PROMPT, "--seed"),
        (("--seed", "-1"), PROMPT, "--seed"),
        (("--device", "meta"), PROMPT, "device must be one that torch can use here"),
        (("--remember", tmp_path / "none" / "kept"), PROMPT, "folder that exists"),
        (("--prediction", wrong), PROMPT, "--prediction"),
        ((tmp_path / "16.txt",), "", "save it as UTF-8"),
        (("--prediction", "nowhere"), PROMPT, "nowhere"),
        (("--max-new-tokens", "513"), PROMPT, "512 positions"),
    ):
        assert said in fails("generate", plain_folder, *args, stdin=stdin)


def test_a_temperature_next_to_nothing_is_none(generate, stock_text):
    assert generate("--temperature", "1e-45").stdout == stock_text(PROMPT, 24)


@pytest.mark.parametrize("more", [["--prediction", "{text}"], ["--draft-model", "{model}"]])
def test_what_else_drafts_saves_steps_and_changes_no_text(
    generate, stock_text, plain_folder, tmp_path, more
):
    text = stock_text(PROMPT, 24)
    (tmp_path / "text").write_text(text, encoding="utf-8")
    more = [each.format(text=tmp_path / "text", model=plain_folder) for each in more]
    result = generate(*more, "--sources", "", "--stats")
    assert result.stdout == text
    assert more[0].strip("-").replace("-", " ") in result.stderr


def test_a_full_disk_and_a_reader_that_leaves(plain_folder, monkeypatch, capsys):
    asked = ["generate", plain_folder, *FEW, "--prompt", PROMPT]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert app.run(asked) == 2
        with open(os.devnull, "w") as nowhere:  # What could not be written is still in its buffer.
            os.dup2(nowhere.fileno(), full.fileno())
    said = capsys.readouterr().err
    assert said.count("error: No space left on device\n") == 1
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert app.run(asked) == 1
    assert "error" not in capsys.readouterr().err


def test_what_a_run_learned_the_next_one_knows(generate, fails, stock_text, tmp_path, chat_folder):
    results = []
    for _ in range(2):
        results.append(generate("--stats", "--remember", tmp_path / "kept"))
        gc.collect()  # The end of the process, as far as drafts are concerned.
    assert {result.stdout for result in results} == {stock_text(PROMPT, 24)}
    cold, warm = (int(re.search(r"in (\d+) steps", r.stderr)[1]) for r in results)
    assert warm < cold
    save_cache(tmp_path / "foreign", contents())
    line = fails("generate", chat_folder, "--remember", tmp_path / "foreign", stdin=PROMPT)
    assert "tokenizer 5a5a5a5a…" in line
