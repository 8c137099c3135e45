"""`selfspec check` and `selfspec demo`: figures, verdicts that are sure, and lines to copy."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from selfspec.cli import check, comparison, report
from selfspec.cli.comparison import Comparison, Question, measure, snippets
from selfspec.cli.messages import harmless
from selfspec.cli.report import has_times, print_report, python_lines, table_of, verdict
from selfspec.plugin import SelfSpec
from selfspec.stats import GenerationStats
from tests.cli.conftest import write_lines
from tests.fakes import new_model
from tests.tiny import make_tokenizer

BRIEFLY = ("--seconds", "1")


@pytest.fixture(autouse=True)
def quickly(tmp_path, monkeypatch):
    """Short answers in few rounds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(check, "_LEAST_TOKENS", 24)
    monkeypatch.setattr(comparison, "_MOST_ROUNDS", 2)


@pytest.fixture
def prompts(tmp_path):
    lines = ({"prompt": "the lazy dog"}, {"prompt": "def read("})
    return write_lines(tmp_path / "prompts.jsonl", *lines)


def test_it_begins_with_the_facts_and_says_what_it_found(run, chat_folder):
    said = run("check", chat_folder, *BRIEFLY).stdout
    assert said.startswith("selfspec ")
    for words in ("transformers ", "torch ", "threads: 1, ", "drafts: as trees\n"):
        assert words in said
    assert "edit" in said
    assert "summary" not in said  # It leaves no room in the 512 positions of this model.
    assert "Same text: 3 of 3 are plain generate()'s, token for token." in said


def test_a_model_without_trees_is_status_one_and_no_speed_up(run, prompts, tmp_path):
    folder = tmp_path / "recurrent"
    new_model("mamba", vocab_size=512).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    result = run("check", folder, "--prompts", prompts, *BRIEFLY)
    assert result.exit_code == 1
    assert "drafts: off: " in result.stdout
    assert "Nothing was drafted: " in result.stdout
    assert not any(word in result.stdout for word in ("speed-up", "from_pretrained"))


def test_prompts_with_images(run, fails, chat_folder, tmp_path):
    pytest.importorskip("PIL", reason="needs the extra: pip install '.[serve]'")
    from tests.processors import data_url, picture, seeing_pair

    for part in seeing_pair():
        part.save_pretrained(tmp_path / "seeing")
    shown = [{"type": "image_url", "image_url": {"url": data_url(picture(n))}} for n in range(2)]
    asked = [{"role": "user", "content": [{"type": "text", "text": "the fox"}, *shown]}]
    lines = write_lines(tmp_path / "prompts.jsonl", {"messages": asked}, {"prompt": "the dog"})
    said = run("check", tmp_path / "seeing", "--prompts", lines, *BRIEFLY).stdout
    assert "Same text: 2 of 2" in said
    assert "this model reads no images" in fails("check", chat_folder, "--prompts", lines)


def test_what_is_wrong_is_one_line(fails, chat_folder, tmp_path):
    assert "--prompts" in fails("check", chat_folder, "--prompts", tmp_path)
    long = write_lines(tmp_path / "long.jsonl", {"prompt": "x" * 600})
    assert "512 positions" in fails("check", chat_folder, "--prompts", long)


def test_the_demo_shows_the_embedded_model(run):
    """Without a terminal it is plain text in 80 columns."""
    said = run("demo", *BRIEFLY).stdout
    assert "\x1b" not in said
    _, _, table = said.partition(" prompt ")
    assert max(map(len, table.partition("Same text")[0].splitlines()[:-1])) <= 80
    for question in snippets():
        assert question.name in said
        assert question.prompt in said
    assert "Same text: 3 of 3" in said
    assert "sampling at temperature 0.5, seed 1" in said
    assert said.endswith("measure yours with 'selfspec check your/model'.\n")


def test_a_terminal_shows_which_tokens_were_drafted(writer, stock_text):
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system="standard")
    prompts = [(Question("one", "the quick"), writer.tokenizer("the quick")["input_ids"])]
    check._show(console, writer, prompts)
    assert "Green: drafted, and right." in out.getvalue()
    _, _, answer = out.getvalue().partition("the quick\x1b[0m")
    shown, _, _ = re.sub(r"\x1b\[(32|0)m", "", answer).partition("\n\x1b")
    assert "\x1b[32m" in answer
    assert shown == harmless(stock_text("the quick", 24))


def test_rounds_start_cold_and_take_turns(writer, monkeypatch):
    calls = []

    def noted(_writer, spec, ids, _num_new):
        calls.append((ids[0], spec))
        return [1, 3 if spec and ids[0] == 6 else 2], 1.0

    monkeypatch.setattr(comparison, "timed", noted)
    asked = [(Question("a", "a"), [5]), (Question("b", "b"), [6])]
    found = measure(writer, asked, SelfSpec, num_new=9, seconds=0)
    assert [prompt for prompt, _ in calls] == [5, 6] * 4
    drafts = [spec is not None for _, spec in calls]
    assert drafts == [False, False, True, True, True, True, False, False]
    first, same, *later = (spec for _, spec in calls if spec is not None)
    assert first is same
    assert first not in later
    assert found.parted == {"b"}


def measured(plain, drafted, *, drafts=9, tokens=101, dtype="float32", kinds=("a",)):
    stats = GenerationStats(num_new_tokens=150, num_steps=100)
    stats.drafted_by_source["lut"] = drafts
    seconds = ([[each] * len(kinds) for each in taken] for taken in (plain, drafted))
    lengths, by_kind = (dict.fromkeys(kinds, each) for each in (tokens, stats))
    return Comparison(dtype, lengths, *seconds, by_kind)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (measured([1.8, 2], [1, 1]), "1.90x faster with selfspec (1.71x to 2.11x in 2 rounds"),
        (measured([1.0, 1.2], [1.0, 1.0]), "Not sure: 0.91x to 1.31x"),
        (measured([1, 1], [1, 1]), "No gain here (1.00x to 1.00x in 2 rounds of 101 tokens, in fl"),
        (measured([9, 9], [1, 1], drafts=0), "Nothing was drafted"),
        (measured([9, 9], [1, 1], tokens=20), "Too few tokens for times"),
    ],
)
def test_what_is_not_sure_is_not_praised(found, text):
    assert verdict(found).startswith(text)
    assert has_times(found) == (found.speed_up < 9)


def test_the_table_and_the_verdict_are_of_the_same_times():
    """One slow round of drafts changes neither."""
    found = measured([1.0, 1.0, 1.0], [0.5, 0.5, 3.0], tokens=100)
    console = Console(file=StringIO(), width=80)
    console.print(table_of(found))
    *_, last = console.file.getvalue().rstrip().splitlines()
    assert last.split() == ["all", "100", "100.0", "200.0", "2.00x", "1.50"]
    assert found.speed_up == 2


def test_lines_to_copy_name_the_memory_and_the_cache(writer):
    asked = replace(writer.options, model="me/model", cache="my/cache")
    found = Comparison("float32")
    streamed, attached = python_lines(replace(asked, max_memory="25%"), found)
    assert streamed == 'model = selfspec.load("me/model", max_memory="25%")'
    assert 'SelfSpec.from_pretrained("my/cache", tokenizer=tokenizer)' in attached
    plain, attached = python_lines(replace(asked, cache=None), found)
    assert plain == 'model = AutoModelForCausalLM.from_pretrained("me/model", dtype="float32")'
    assert attached == "selfspec.attach(model, selfspec.SelfSpec())"
    _, packed = python_lines(replace(asked, cache=None), replace(found, packs=True))
    assert packed == "selfspec.attach(model, selfspec.SelfSpec(), pack=True)"
    seeing, _ = python_lines(replace(asked, cache=None), found, sees=True)
    assert "AutoModelForImageTextToText" in seeing
    _, itself = python_lines(replace(asked, draft_model="int4"), found)
    assert itself.endswith(', tokenizer=tokenizer, draft_model="int4"))')
    _, loaded, drafting = python_lines(replace(asked, cache=None, draft_model="me/small"), found)
    assert loaded == 'small = AutoModelForCausalLM.from_pretrained("me/small")'
    assert drafting == "selfspec.attach(model, selfspec.SelfSpec(draft_model=small))"
    idle = replace(found, stats={"a": GenerationStats(draft_model_reason="2 looks in 9 steps")})
    _, without = python_lines(replace(asked, cache=None, draft_model="int4"), idle)
    assert without == attached
    rounded, _ = python_lines(replace(asked, weights="int8"), found, sees=True)
    assert rounded.endswith('weights="int8", sees=True)')


def test_where_4_bits_are_slower_than_8_it_says_so(run, chat_folder, prompts, monkeypatch):
    args = ("check", chat_folder, "--prompts", prompts, "--weights", "int4", *BRIEFLY)
    for seconds, says_so in ({4: 1.0, 8: 1.0}, False), ({4: 1.5, 8: 1.0}, True):
        monkeypatch.setattr("selfspec.weights.rounded.seconds_a_token", seconds.get)
        note = "A product in 4 bits takes 1.5 times as long as in 8 on this CPU"
        assert (note in run(*args).stdout) == says_so


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_another_text_is_told_and_in_float32_it_fails(writer, dtype, status):
    """Acceptance is told as by vLLM."""
    console, found = Console(file=StringIO(), width=200), measured([2, 2], [1, 1], dtype=dtype)
    found.stats["a"] += GenerationStats(num_steps=4, num_nodes=12, num_drafts=4)
    found.stats["a"].accepted_lengths.update({2: 3, 0: 1})
    assert print_report(console, found, writer.options) == 0
    for said in (
        "Mean acceptance length 2.50: 6 of ",
        "rate by position 0: 0.75, 1: 0.75.\n",
    ):
        assert said in console.file.getvalue()
    found.parted.add("a")
    assert print_report(console, found, writer.options) == status
    assert ("NOT the same text: 0 of 1" in console.file.getvalue()) == bool(status)


def test_it_measures_a_draft_model(run, chat_folder, prompts, monkeypatch):
    monkeypatch.setattr(report, "_ENOUGH", 8)
    monkeypatch.setattr(check, "_MOST_TOKENS", 24)
    drafting = ("--draft-model", "int4")
    said = run("check", chat_folder, "--prompts", prompts, *drafting, *BRIEFLY).stdout
    assert "Same text: 2 of 2" in said
    assert "draft model" not in run("check", chat_folder, "--prompts", prompts, *BRIEFLY).stdout


def test_a_model_that_cant_draft_for_itself_says_why(run, prompts, tmp_path):
    folder = tmp_path / "gpt2"
    new_model("gpt2", vocab_size=512).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    drafting = ("--draft-model", "int4")
    said = run("check", folder, "--prompts", prompts, *drafting, *BRIEFLY).stdout
    reason = "most of its weights are in no linear layers"
    assert f"The draft model drafted little or nothing: {reason}." in said
