"""`selfspec cache build, inspect, merge`, and `--cache` of the commands that write text."""

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from selfspec.building.recipe import recipe_names
from selfspec.cache import load_cache, save_cache, tokenizer_info
from tests.caches import OWNER, contents, count_grams, lut, rates
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
        return folder

    @pytest.fixture
    def command(self, plain_folder, tmp_path):
        return ("cache", "build", plain_folder, tmp_path / "cache")

    def test_a_folder_of_texts(self, run, command, texts, tmp_path):
        result = run(*command, "--data", texts)
        assert result.exit_code == 0
        assert "n-gram prefixes of up to 4 tokens" in result.stdout
        about = load_cache(tmp_path / "cache").about
        assert (about["name"], about["documents"]) == ("texts", 3)

    def test_options_replace_the_keys_of_a_recipe(self, run, command, texts, tmp_path):
        file = tmp_path / "r.toml"
        file.write_text('name = "n"\ndata = "x"\nbuild = "lut"\nmin_count = 4\n')
        assert run(*command, "--recipe", file, "--data", texts, "--build", "ngrams").exit_code == 0
        about = load_cache(tmp_path / "cache").about
        assert about["name"] == "n"
        assert (about["recipe"]["build"], about["recipe"]["min_count"]) == ("ngrams", 4)

    def test_own_answers_by_name_and_after_ctrl_c(self, run, command, tmp_path, monkeypatch):
        """The same command goes on; another one does not take the answers for its own."""
        (tmp_path / "prompts.txt").write_text("the quick\n\ndef read\n")
        own = ("--recipe", "own-answers", "--max-new-tokens", "5", "--no-chat-template")
        command = (*command, "--data", tmp_path / "prompts.txt", "--form", "line", *own)

        def interrupted(*_, **_more):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("selfspec.building.build.GramCounter", interrupted)
            result = run(*command)
        assert result.exit_code == 130
        assert "The same command goes on with the next answer" in result.stderr
        assert not (tmp_path / "cache.safetensors").exists()
        other = run(*command, "--temperature", "0.5")
        assert other.exit_code == 2
        assert "holds the answers of another build" in other.stderr
        assert "left out (empty, too long, or refused by the template): 1" in run(*command).stdout
        assert load_cache(tmp_path / "cache").about["answers"] == 2
        assert not (tmp_path / "cache.answers").exists()

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ((), "--data must name what to read"),
            (("--data", "./nowhere"), "--data must be a file or folder that exists"),
            (("--data", "{texts}", "--max-documents", "0"), "--max-documents must be greater than"),
            (("--data", "{texts}", "--recipe", "fodler"), "did you mean 'folder'"),
            (
                ("--data", "{texts}", "--recipe", "{texts}/none.toml"),
                "must be a readable TOML file",
            ),
            (("--data", "{texts}", "--dtype", "int8"), '"int8" for --dtype'),
            (("--data", "{texts}", "--recipe", "own-answers"), "pass --no-chat-template"),
            (("--data", "{texts}", "--messages", "x", "--no-chat-template"), "unknown column 'x'"),
        ],
    )
    def test_mistakes_are_answered_in_a_line(self, fails, command, texts, tmp_path, args, said):
        assert said in fails(*command, *(arg.format(texts=texts) for arg in args))
        assert [path.name for path in tmp_path.iterdir() if "cache" in path.name] == []

    def test_what_is_there_is_replaced_only_when_asked(self, run, fails, command, texts, tmp_path):
        there = tmp_path / "cache.safetensors"
        there.write_text("x")
        ngrams = (*command, "--data", texts, "--build", "ngrams")
        assert "--overwrite" in fails(*ngrams)
        assert "must be a cache" in fails(*ngrams, "--overwrite")
        there.unlink()
        assert run(*ngrams).exit_code == 0
        assert run(*ngrams, "--overwrite").exit_code == 0

    def test_help_names_every_recipe_and_fits_on_a_screen(self, run):
        lines = run("cache", "build", "--help").stdout.splitlines()
        said = " ".join(" ".join(lines).replace("│", " ").split())
        assert all(name in said for name in recipe_names())
        assert len(lines) <= 40


class TestInspect:
    def test_it_tells_what_is_in_it(self, run, folder):
        out = run("cache", "inspect", folder).stdout
        assert "3 lut rows, 2 lut2 rows, 18 n-gram prefixes of up to 2 tokens, 2 rates" in out
        assert "a tree of 4 nodes; tokenizer 5a5a5a5a… (owner/toy)" in out
        assert "corpus: digits of π\n" in out

    def test_what_a_card_says_is_not_obeyed(self, run, tmp_path):
        save_cache(tmp_path / "cache", contents(about={"corpus": "\x1b[31mred"}))
        assert "\x1b" not in run("cache", "inspect", tmp_path / "cache").stdout

    def test_a_cache_that_is_none(self, fails, tmp_path):
        assert "nowhere" in fails("cache", "inspect", tmp_path / "nowhere")


class TestMerge:
    def test_counts_add_up_and_later_rows_win(self, run, folder, tmp_path):
        other = contents(tables={"lut": lut([0, 3], 6)}, corpus=count_grams([3, 1, 5] * 4))
        save_cache(tmp_path / "other", other)
        result = run("cache", "merge", tmp_path / "out", folder, tmp_path / "other")
        assert result.exit_code == 0
        out = load_cache(tmp_path / "out")
        ids = out.tables["lut"]["ids"].tolist()
        rows = dict(zip(out.tables["lut"]["tokens"], ids, strict=True))
        assert rows[3] == lut([0, 3], 6)["ids"][1].tolist()
        assert rows[1] == [*lut()["ids"][0].tolist(), -1, -1]
        assert list(rows) == [0, 1, 3, 9]
        assert out.tables["lut2"]["pairs"].tolist() == [[1, 4], [3, 1]]
        assert out.calibration == rates()
        assert out.about == {"merged_from": [contents().about, other.about]}
        prefixes = out.corpus.step(out.corpus.step((), 3), 1)
        assert out.corpus.continuations(2, prefixes[1], 9) == (7, [(5, 4), (4, 3)])

    def test_what_is_wrong_is_one_line(self, fails, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        out = tmp_path / "out"
        assert "--overwrite" in fails("cache", "merge", folder, folder)
        (tmp_path / "link.safetensors").symlink_to(folder)
        for other in (folder, Path("cache"), tmp_path / "link"):
            line = fails("cache", "merge", out, folder, other)
            assert f"must be named once, since counts add up (got {str(folder)!r} and" in line
        save_cache(tmp_path / "longer", contents(corpus=count_grams(LINES[0].encode(), 3)))
        line = fails("cache", "merge", out, folder, tmp_path / "longer")
        assert "the corpus tables can't be merged" in line
        foreign = contents(tokenizer=tokenizer_info(_Other()))
        save_cache(tmp_path / "foreign", foreign)
        line = fails("cache", "merge", out, folder, tmp_path / "foreign")
        assert "caches to merge must belong to one tokenizer" in line
        save_cache(tmp_path / "wide", contents(tables={"lut": lut([1, 2**31 - 1])}))
        line = fails("cache", "merge", out, folder, tmp_path / "wide")
        assert "entries (got 2147483648 tokens with 4 next ones each)" in line
        os.truncate(folder, 99)
        assert "can't be read" in fails("cache", "merge", out, folder)
        assert not out.exists()

    def test_overwrite(self, run, folder):
        assert run("cache", "merge", folder, folder, "--overwrite").exit_code == 0
        assert load_cache(folder).about == {"merged_from": [contents().about]}


class _Other:
    def get_vocab(self) -> dict[str, int]:
        return {"other": OWNER.vocab_size - 1}


class TestOption:
    @pytest.fixture
    def written(self, run, plain_folder):
        def write(*args):
            few = ("--max-new-tokens", "24")
            return run("generate", plain_folder, *few, "--stats", *args, stdin=PROMPT)

        return write

    def test_the_text_is_the_same_and_comes_sooner(self, written, plain_folder, tmp_path):
        cold = written()
        tokenizer = AutoTokenizer.from_pretrained(plain_folder)
        ids = tokenizer(PROMPT + cold.stdout)["input_ids"]
        held = contents(
            tokenizer=tokenizer_info(tokenizer),
            tables={},
            corpus=count_grams(ids),
            calibration=None,
        )
        save_cache(tmp_path / "cache", held)
        warm = written("--cache", tmp_path / "cache")
        assert warm.exit_code == 0
        assert warm.stdout == cold.stdout
        assert "corpus" in warm.stderr
        assert "corpus" not in cold.stderr

    def test_another_tokenizers_cache_and_a_damaged_one_are_refused(
        self, fails, chat_folder, folder
    ):
        asked = ("check", chat_folder, "--cache", folder)
        line = fails(*asked)
        assert "was made for tokenizer 5a5a5a5a… (owner/toy), this model uses" in line
        os.truncate(folder, 99)
        assert "can't be read" in fails(*asked)
