"""`selfspec cache inspect, merge, verify`, and `--cache` of the commands that write text."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from selfspec.cli.cache.coverage import coverage
from selfspec.cli.cache.merging import merged
from selfspec.cli.cache.top_entries import top_entries
from selfspec.store import load_cache, save_cache, tokenizer_info, verify_cache
from tests.caches import TEXT, contents, count_grams, flip_byte, lut, lut2, plain, rates
from tests.tiny import LINES

PROMPT = "def read(self, size"


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def folder(tmp_path):
    save_cache(tmp_path / "cache", contents())
    return tmp_path / "cache"


@pytest.fixture
def real(plain_folder, tmp_path):
    """The n-grams of a text in the tokens of the tiny model, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(plain_folder)
    ids = tokenizer("".join(LINES) * 3)["input_ids"]
    held = contents(tokenizer=tokenizer_info(tokenizer), corpus=count_grams(ids, 3), about={"n": 3})
    save_cache(tmp_path / "real", held)
    return tmp_path / "real", tokenizer


class TestVerify:
    def test_a_sound_cache(self, run, folder):
        result = run("cache", "verify", folder)
        assert result.exit_code == 0
        assert result.stdout == (
            "calibration.json: ok\ncorpus.safetensors: ok\nfitted.json: ok\n"
            "lut.safetensors: ok\ncache.json: ok\n"
        )

    def test_a_damaged_one(self, run, folder):
        flip_byte(folder / "lut.safetensors")
        result = run("cache", "verify", folder)
        assert result.exit_code == 2
        lines = result.stdout.splitlines()
        assert [line.split(": ")[1] for line in lines] == ["ok", "ok", "ok", "DAMAGED", "ok"]
        assert "lut.safetensors: DAMAGED: lut.safetensors of cache" in lines[3]


class TestInspect:
    def test_it_tells_what_is_in_it(self, run, folder):
        out = run("cache", "inspect", folder).stdout
        assert "tokenizer 5a5a5a5a… (owner/toy), 50 tokens" in out
        assert "prefixes: 18\n" in out
        assert f"lut.safetensors: {(folder / 'lut.safetensors').stat().st_size:,} bytes" in out
        assert "entries of a LUT row: 4, longest prefix: 2" in out
        assert "corpus: digits of π\n" in out
        assert "  3 1 -> 4  (3 times)\n" in out

    def test_top_says_how_many(self, run, folder):
        assert "->" not in run("cache", "inspect", folder, "--top", "0").stdout
        out = run("cache", "inspect", folder, "--top", "2").stdout
        assert out.count("->") == 4 * 2

    def test_a_tokenizer_shows_text(self, run, real, plain_folder):
        out = run("cache", "inspect", real[0], "--tokenizer", plain_folder).stdout
        assert "' the'" in out or "'the'" in out or "' lazy'" in out or "'self'" in out

    def test_coverage_of_a_text(self, run, real, tmp_path):
        (tmp_path / "text").write_text(LINES[1])
        real[1].model_max_length = 4  # The text may be longer than the model can read at once.
        real[1].save_pretrained(tmp_path / "short")
        asked = ("--tokenizer", tmp_path / "short", "--text", tmp_path / "text")
        result = run("cache", "inspect", real[0], *asked)
        assert result.stderr == f"Reading {real[0]} ...\n"
        out = result.stdout
        assert "corpus, 3 before  100.0% found, 100.0% named" in out

    def test_what_a_card_says_is_not_obeyed(self, run, tmp_path):
        save_cache(tmp_path / "cache", contents(about={"corpus": "\x1b[31mred"}))
        assert "\x1b" not in run("cache", "inspect", tmp_path / "cache").stdout

    def test_what_is_wrong_is_one_line(self, fails, folder, plain_folder, tmp_path):
        assert "--text needs --tokenizer" in fails("cache", "inspect", folder, "--text", folder)
        asked = ("cache", "inspect", folder, "--tokenizer", plain_folder)
        assert "was built for tokenizer 5a5a5a5a…" in fails(*asked)
        assert "--text must be readable" in fails(*asked, "--text", tmp_path / "nowhere")
        (tmp_path / "bytes").write_bytes(b"\xff")
        assert "--text must be UTF-8 text" in fails(*asked, "--text", tmp_path / "bytes")
        line = fails("cache", "inspect", folder, "--tokenizer", tmp_path)
        assert f"the tokenizer of '{tmp_path}' can't be loaded" in line
        assert "must hold a cache.json" in fails("cache", "inspect", tmp_path / "nowhere")
        flip_byte(folder / "lut.safetensors")
        assert "must have the sha256" in fails("cache", "inspect", folder)


class TestMerge:
    def test_counts_add_up_and_later_rows_win(self, run, folder, tmp_path):
        other = contents(tables={"lut": lut([0, 3], 6)}, corpus=count_grams([3, 1, 5] * 4))
        save_cache(tmp_path / "other", other)
        result = run("cache", "merge", tmp_path / "out", folder, tmp_path / "other")
        assert result.exit_code == 0
        assert verify_cache(tmp_path / "out").ok
        out = load_cache(tmp_path / "out")
        rows = dict(
            zip(out.tables["lut"]["tokens"], out.tables["lut"]["ids"].tolist(), strict=True)
        )
        assert rows[3] == lut([0, 3], 6)["ids"][1].tolist()
        assert rows[1] == [*lut()["ids"][0].tolist(), -1, -1]
        assert list(rows) == [0, 1, 3, 9]
        assert out.calibration == [[kinds, 2 * hits, 2 * trials] for kinds, hits, trials in rates()]
        assert out.about == {"merged_from": [contents().about, other.about]}
        places = out.corpus.step(out.corpus.step((), 3), 1)
        assert out.corpus.continuations(2, places[1], 9) == (7, [(5, 4), (4, 3)])

    def test_a_cache_merged_alone_is_itself(self):
        alone = merged([contents()])
        assert plain(alone)[:4] == plain(contents())[:4]

    def test_parts_that_are_missing_are_nothing(self):
        bare = contents(tables={}, corpus=None, calibration=None)
        assert plain(merged([bare, bare]))[1:4] == ({}, None, None)
        assert plain(merged([bare, contents()]))[1:4] == plain(contents())[1:4]

    def test_pairs_merge_by_both_tokens(self):
        one = contents(tables={"lut2": lut2([(1, 4), (3, 1)])})
        other = contents(tables={"lut2": lut2([(0, 9), (1, 4), (4, 1)])})
        pairs = merged([one, other]).tables["lut2"]["pairs"].tolist()
        assert pairs == [[0, 9], [1, 4], [3, 1], [4, 1]]

    def test_what_is_wrong_is_one_line(self, fails, folder, tmp_path):
        out = tmp_path / "out"
        assert "must be free" in fails("cache", "merge", folder, folder)
        assert "must hold a cache.json" in fails("cache", "merge", out, folder, tmp_path)
        save_cache(tmp_path / "longer", contents(corpus=count_grams(TEXT, 3)))
        line = fails("cache", "merge", out, folder, tmp_path / "longer")
        assert "the corpus tables can't be merged" in line
        foreign = contents(tokenizer=tokenizer_info(_Other()), corpus=count_grams(TEXT[1:]))
        save_cache(tmp_path / "foreign", foreign)
        line = fails("cache", "merge", out, folder, tmp_path / "foreign")
        assert "FOLDERS must belong to one tokenizer" in line
        flip_byte(folder / "corpus.safetensors")
        assert "must have the sha256" in fails("cache", "merge", out, folder)
        assert not out.exists()
        (folder / "notes.txt").write_text("mine")
        line = fails("cache", "merge", folder, folder, "--overwrite")
        assert "what is overwritten must be a cache folder with no other files" in line

    def test_the_same_cache_twice(self, fails, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link").symlink_to(folder)
        for other in (folder, Path("cache"), tmp_path / "link", folder / ".." / "cache"):
            line = fails("cache", "merge", "out", folder, other)
            assert f"must name each cache once (got {str(folder)!r} and {str(other)!r}" in line

    def test_a_copy_of_a_cache(self, fails, folder, tmp_path):
        shutil.copytree(folder, tmp_path / "copy")
        line = fails("cache", "merge", tmp_path / "out", folder, tmp_path / "copy")
        assert f"(got {str(folder)!r} and {str(tmp_path / 'copy')!r}): they hold the same" in line
        other = contents(tables={"lut": lut([0, 3], 6)}, calibration=None)
        save_cache(tmp_path / "counts", other)
        line = fails("cache", "merge", tmp_path / "out", folder, tmp_path / "counts")
        assert "they hold the same counts" in line

    def test_overwrite(self, run, folder):
        run("cache", "merge", folder, folder, "--overwrite")
        assert load_cache(folder).about == {"merged_from": [contents().about]}


class _Other:
    def get_vocab(self) -> dict[str, int]:
        return {"other": 0}


class TestCoverage:
    def test_a_plain_count_agrees(self):
        held = contents(tables={"lut": lut(), "lut2": lut2()})
        text = [3, 1, 4, 2, 8, 3, 1, 5]
        lines = {line.what: line for line in coverage(held, text)}
        grams = {tuple(TEXT[i - n : i + 1]) for n in (1, 2) for i in range(n, len(TEXT))}
        for n in (1, 2):
            spans = [tuple(text[i - n : i + 1]) for i in range(n, len(text))]
            line = lines[f"corpus, {n} before"]
            assert line.num_positions == len(spans)
            assert line.num_found == sum(any(g[:-1] == s[:-1] for g in grams) for s in spans)
            assert line.num_named == sum(s in grams for s in spans)
        assert lines["corpus, any"].num_positions == 7
        assert (lines["lut"].num_positions, lines["lut2"].num_positions) == (7, 6)
        known = {t: set(i) for t, i in zip([1, 3, 9], lut()["ids"].tolist(), strict=True)}
        pairs = list(pairwise(text))
        assert lines["lut"].num_found == sum(a in known for a, _ in pairs)
        assert lines["lut"].num_named == sum(b in known.get(a, ()) for a, b in pairs)

    @pytest.mark.parametrize("text", [[], [3], [49, 49, 49]])
    def test_texts_that_nobody_knows(self, text):
        for line in coverage(contents(), text):
            assert line.num_found == line.num_named == 0


def test_top_entries_are_those_of_a_plain_count():
    held = contents(corpus=count_grams(TEXT, 4))
    counts: dict[tuple, int] = {}
    for n in (1, 2, 3, 4):
        for end in range(n, len(TEXT)):
            span = tuple(TEXT[end - n : end + 1])
            counts[span] = counts.get(span, 0) + 1
    shown = [entry for title, each in top_entries(held, 99) if "behind" in title for entry in each]
    assert {(*e.before, *e.after): int(e.weight.split()[0]) for e in shown} == counts
    assert dict(top_entries(contents(tables={"lut": lut([])}, corpus=None), 5)) == {
        "surest of lut": []
    }


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
        asked = ("demo", chat_folder, "--cache", folder)
        line = fails(*asked)
        assert "--cache was built for tokenizer 5a5a5a5a… (owner/toy), this model uses" in line
        flip_byte(folder / "corpus.safetensors")
        assert "corpus.safetensors of cache" in fails(*asked)
