"""`selfspec generate`: continuations through pipes and files."""

import gc
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from selfspec.cache import save_cache
from selfspec.cli.shared.writer import Writer
from tests.caches import contents

PROMPT = "def read(self, size"
FEW = ("--max-new-tokens", "24")


@pytest.fixture
def generate(run, plain_folder):
    return lambda *args, stdin=PROMPT: run("generate", plain_folder, *args, *FEW, stdin=stdin)


def test_stdin_to_stdout_is_the_continuation_alone(generate, stock_text, plain_folder):
    result = generate()
    assert result.exit_code == 0
    assert result.stdout == stock_text(PROMPT, 24)
    assert result.stderr == f"Loading {plain_folder} ...\n"


def test_from_a_file_to_a_file_with_the_prompt_in_front(generate, stock_text, tmp_path):
    (tmp_path / "prompt.txt").write_text("the quick brown")
    result = generate(tmp_path / "prompt.txt", "--full", "--output", tmp_path / "out.txt")
    assert result.stdout == ""
    text = "the quick brown" + stock_text("the quick brown", 24)
    assert (tmp_path / "out.txt").read_bytes().decode() == text


def test_a_prompt_on_the_command_line(run, fails, generate, stock_text, loaded, chat_folder):
    assert generate("--prompt", "the fox", stdin="").stdout == stock_text("the fox", 24)
    asked = ("generate", chat_folder, *FEW, "--chat", "--prompt", "the fox")
    messages = [{"role": "user", "content": "the fox"}]
    ids = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert run(*asked).stdout == stock_text(ids, 24)
    assert "give FILE or --prompt, not both" in fails("generate", chat_folder, "a", "--prompt", "b")


def test_stats_begin_a_line_of_their_own(generate, stock_text):
    """The text, which is in front of it at a terminal, may end in the middle of a line."""
    result = generate("--stats")
    assert result.stdout == stock_text(PROMPT, 24)
    assert "\n\n24 new tokens in" in result.stderr


def test_sampling_is_stocks_with_the_same_seed(generate, stock_text):
    result = generate("--temperature", "0.9", "--seed", "7")
    torch.manual_seed(7)
    assert result.stdout == stock_text(PROMPT, 24, do_sample=True, temperature=0.9)


def test_without_a_seed_every_run_draws_anew(generate):
    texts = {generate("--temperature", "2").stdout for _ in range(3)}
    assert len(texts) > 1


def test_plain_decoding_writes_the_same_and_says_why(generate, stock_text, monkeypatch):
    monkeypatch.setattr("selfspec.plugin.call.Call.plain_reason", "it is Sunday")
    result = generate()
    assert result.stdout == stock_text(PROMPT, 24)
    assert result.stderr.count("not drafted for as asked: it is Sunday") == 1


def test_wrong_prompts_and_predictions(fails, plain_folder, tmp_path):
    wrong = tmp_path / "latin.txt"
    wrong.write_bytes(b"ab\xff")
    command = ("generate", plain_folder)
    assert "the prompt must not be empty (got nothing from stdin)" in fails(*command, stdin="")
    assert "FILE must be UTF-8 text (got byte 2 wrong)" in fails(*command, stdin=b"ab\xff")
    line = fails(*command, "def main():")
    assert line.endswith("No such file or directory); --prompt takes the text itself\n")
    line = fails(*command, "--prediction", wrong, stdin=PROMPT)
    assert "--prediction must be UTF-8 text (got byte 2 wrong)" in line


def test_a_prediction_saves_steps_and_changes_no_text(generate, stock_text, tmp_path):
    text = stock_text(PROMPT, 24)
    (tmp_path / "expected.txt").write_text(text, encoding="utf-8")
    result = generate("--prediction", tmp_path / "expected.txt", "--sources", "", "--stats")
    assert result.stdout == text
    assert "prediction" in result.stderr
    (tmp_path / "empty.txt").write_text("")
    assert generate("--prediction", tmp_path / "empty.txt").stdout == text


def test_a_draft_model_saves_steps_and_changes_no_text(generate, fails, stock_text, plain_folder):
    result = generate("--draft-model", plain_folder, "--sources", "", "--stats")
    assert result.stdout == stock_text(PROMPT, 24)
    assert "forwards of the draft model" in result.stderr
    line = fails("generate", plain_folder, "--draft-model", "./nowhere", stdin=PROMPT)
    assert "--draft-model must be a folder that exists" in line


def test_wrong_outputs(fails, plain_folder, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "out.txt"):
        line = fails("generate", plain_folder, "--output", path, stdin=PROMPT)
        assert "--output must be a file in a folder that exists" in line
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    line = fails("generate", plain_folder, prompt, "--output", prompt)
    assert f"--output must be a new file (got {str(prompt)!r}, which exists)" in line
    assert prompt.read_text() == PROMPT


def test_a_disk_that_is_full(plain_folder):
    command = [sys.executable, "-m", "selfspec.cli", "generate", plain_folder, *FEW]
    with open("/dev/full", "w") as full:
        for more, name in ((["--output", "/dev/full"], "--output"), ([], "stdout")):
            done = subprocess.run(
                [*command, *more], input=b"the", stdout=full, stderr=subprocess.PIPE, check=False
            )
            last = done.stderr.decode().splitlines()[-1]
            assert last.startswith(f"error: {name} must be writable (got ")
            assert last.endswith("No space left on device)")
            assert done.returncode == 2


def test_an_error_of_the_model_is_not_told_as_one_of_stdout(generate, monkeypatch):
    monkeypatch.setattr(Writer, "write", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        generate()


@pytest.mark.long
def test_a_reader_that_leaves_is_not_an_error(plain_folder):
    command = [sys.executable, "-m", "selfspec.cli", "generate", plain_folder]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "400"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    process.stdin.write(PROMPT.encode())
    process.stdin.close()
    assert process.stderr.read() == f"Loading {plain_folder} ...\n".encode()
    process.stderr.close()
    assert process.wait(timeout=120) == 1


def test_what_a_run_learned_the_next_one_knows(generate, stock_text, tmp_path):
    results = []
    for _ in range(2):
        results.append(generate("--stats", "--remember", tmp_path / "kept"))
        gc.collect()  # The end of the process, as far as drafts are concerned.
    assert {result.stdout for result in results} == {stock_text(PROMPT, 24)}
    cold, warm = (int(re.search(r"in (\d+) steps", r.stderr)[1]) for r in results)
    assert warm < cold


def test_what_another_tokenizer_learned_is_refused(fails, chat_folder, tmp_path):
    save_cache(tmp_path / "kept", contents(corpus=None))
    line = fails("generate", chat_folder, "--remember", tmp_path / "kept", stdin=PROMPT)
    assert "was made for tokenizer 5a5a5a5a… (owner/toy), this model uses" in line
