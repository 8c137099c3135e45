"""`selfspec cache build`, and `--cache` of the commands that write text."""

import os
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from selfspec.cache import load_cache, save_cache, tokenizer_info
from tests.caches import contents
from tests.tiny import LINES

PROMPT = "def read(self, size"


@pytest.fixture
def folder(tmp_path):
    save_cache(tmp_path / "cache", contents())
    return tmp_path / "cache.safetensors"


class TestBuild:
    @pytest.fixture
    def texts(self, tmp_path):
        folder = tmp_path / "texts"
        folder.mkdir()
        for index, line in enumerate(LINES):
            (folder / f"{index}.txt").write_text(line * 2)
        (tmp_path / "texts.jsonl").write_text('{"ids": ["x"]}')
        return folder

    @pytest.fixture
    def command(self, plain_folder, tmp_path):
        return ("cache", "build", plain_folder, tmp_path / "cache")

    def test_a_folder_of_texts(self, run, command, texts, tmp_path):
        result = run(*command, "--data", texts)
        assert result.exit_code == 0
        about = load_cache(tmp_path / "cache").about
        assert (about["data"], about["documents"]) == ("texts", 3)
        assert "3 documents of " in result.stdout

    def test_answers_of_a_batch(self, run, command, tmp_path):
        prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
        prompts.write_text('{"prompt": "the quick"}\n{"prompt": "def read"}\n')
        run("batch", command[2], prompts, answers, "--max-new-tokens", "5")
        assert run(*command, "--data", answers).exit_code == 0
        assert load_cache(tmp_path / "cache").about["documents"] == 2

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (("--data", "./nowhere"), "--data"),
            ((), "--data"),
            (("--data", "{texts}.jsonl"), "line 1: ids.0: Input should be a valid integer"),
        ],
    )
    def test_a_mistake_is_one_line(self, fails, command, texts, tmp_path, args, said):
        assert said in fails(*command, *(arg.format(texts=texts) for arg in args))
        assert "OUTPUT" in fails(*command[:3], "", "--data", texts)
        assert not list(tmp_path.glob("cache*"))

    def test_what_is_there_is_replaced_only_when_asked(self, run, fails, command, texts, tmp_path):
        there = tmp_path / "cache.safetensors"
        there.write_text("x")
        wanted = (*command, "--data", texts)
        assert "or replace it with --overwrite" in fails(*wanted)
        assert "must be a cache" in fails(*wanted, "--overwrite")
        there.unlink()
        assert run(*wanted).exit_code == run(*wanted, "--overwrite").exit_code == 0


class TestOption:
    def test_the_text_is_the_same_and_comes_sooner(self, run, plain_folder, tmp_path):
        def written(*args):
            few = ("--max-new-tokens", "24", "--max-memory", "100%")
            return run("generate", plain_folder, *few, "--stats", *args, stdin=PROMPT)

        cold = written()
        tokenizer = AutoTokenizer.from_pretrained(plain_folder)
        ids = tokenizer(PROMPT + cold.stdout)["input_ids"]
        answers = np.array([*ids, -1], np.int32)
        held = {"tokenizer": tokenizer_info(tokenizer), "tables": {}, "calibration": None}
        save_cache(tmp_path / "cache", contents(answers=answers, **held))
        warm = written("--cache", tmp_path / "cache")
        assert (warm.exit_code, warm.stdout) == (0, cold.stdout)
        cold_steps, warm_steps = (
            int(re.search(r"in (\d+) steps", each.stderr)[1]) for each in (cold, warm)
        )
        assert warm_steps < cold_steps

    def test_another_tokenizers_cache_and_a_damaged_one(self, fails, chat_folder, folder):
        asked = ("check", chat_folder, "--cache", folder)
        assert "tokenizer 5a5a5a5a…" in fails(*asked)
        os.truncate(folder, 99)
        assert "can't be read" in fails(*asked)
