"""`selfspec check` and `selfspec demo`: figures, verdicts that are sure, and lines to copy."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from selfspec.cache import save_cache, tokenizer_info
from selfspec.cli.check import check_command, stopwatch
from selfspec.cli.check.questions import SNIPPETS, Question
from selfspec.cli.check.report import bars, print_texts, python_lines, verdict
from selfspec.cli.check.stopwatch import (
    CACHED,
    DRAFTED,
    PLAIN,
    ComparedPrompt,
    Comparison,
    TimedAnswer,
    measure,
)
from selfspec.cli.shared.live_text import OWN
from selfspec.cli.shared.paint import harmless
from selfspec.cost import CostCurve
from selfspec.plugin import SelfSpec
from selfspec.stats import GenerationStats
from tests.caches import contents, count_grams
from tests.fakes import new_model
from tests.tiny import make_tokenizer

CURVE = CostCurve({1: 0.02, 4: 0.022, 64: 0.05})
FEW = ("--max-new-tokens", "16", "--seconds", "1")
TWO = ("--prompt", "the quick brown", "--prompt", "def read(")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr(check_command, "_LEAST_TOKENS", 24)
    monkeypatch.setattr(stopwatch, "_MOST_ROUNDS", 2)


@pytest.fixture
def quiet(monkeypatch):
    """A machine that does nothing else, as far as we are told."""
    monkeypatch.setattr(stopwatch, "_processor_share", lambda _model: [1.0])
    monkeypatch.setattr(Comparison, "variation", 0.0)


@pytest.fixture
def prompts(tmp_path):
    lines = ({"turns": ["the lazy dog", "and then"]}, {"prompt": "def read("})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class TestCheck:
    def test_it_begins_with_the_facts_and_ends_with_what_to_use(
        self, run, chat_folder, tmp_path, quiet
    ):
        result = run("check", chat_folder, "--seconds", "1")
        said = result.stdout
        assert said.startswith("selfspec: ")
        for words in ("transformers ", "torch ", "packed weights: oneDNN ", "drafts: on, as trees"):
            assert words in said
        assert "edit, with prediction=" in said
        assert "summary" not in said  # It leaves no room in the 512 positions of this model.
        is_busy = "Too busy to say" in said  # By what others do on this machine meanwhile.
        assert ("speed-up" in said) == (result.exit_code == 0 and not is_busy)
        if result.exit_code == 0 and not is_busy:
            assert "Cost of a step in plain steps" in said
            assert f'from_pretrained("{chat_folder}", dtype="float32")' in said
        assert (tmp_path / "caches").exists()  # Later calls start from what was measured.

    def test_a_model_without_trees_is_status_one_and_no_speed_up(self, run, prompts, tmp_path):
        folder = tmp_path / "recurrent"
        new_model("mamba", vocab_size=512).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        result = run("check", folder, "--prompts", prompts, "--seconds", "1")
        assert result.exit_code == 1
        assert "drafts: off: " in result.stdout
        assert "Nothing was drafted: " in result.stdout
        assert "speed-up" not in result.stdout
        assert "from_pretrained" not in result.stdout

    def test_a_cache_is_compared_with_none(self, run, chat_folder, prompts, tmp_path, loaded):
        held = contents(
            tokenizer=tokenizer_info(loaded.tokenizer),
            tables={},
            corpus=count_grams(loaded.tokenizer("def read(self)")["input_ids"]),
            calibration=None,
        )
        save_cache(tmp_path / "cache", held)
        given = ("--prompts", prompts, "--seconds", "1")
        result = run("check", chat_folder, *given, "--cache", tmp_path / "cache")
        assert "with the cache," in result.stdout

    def test_within_a_memory(self, run, chat_folder, prompts):
        given = ("--prompts", prompts, "--seconds", "1", "--max-memory", "100%")
        assert "Same text: 2 of 2" in run("check", chat_folder, *given).stdout

    def test_what_is_wrong_is_one_line(self, fails, chat_folder, tmp_path):
        assert "--prompts must be a file with one prompt a line" in fails(
            "check", chat_folder, "--prompts", tmp_path
        )
        assert "unknown dtype 'int8'" in fails("check", chat_folder, "--dtype", "int8")
        (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 600}))
        line = fails("check", chat_folder, "--prompts", tmp_path / "long.jsonl")
        assert "a prompt must leave room for 24 tokens in the model's 512 positions" in line


class TestDemo:
    def test_texts_are_plain_ones_and_it_says_how_they_came(
        self, run, plain_folder, stock_text, quiet
    ):
        """Without a terminal it is plain text in 80 columns."""
        result = run("demo", plain_folder, *FEW, *TWO, "--budget", "fixed")
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        _, _, tables = result.stdout.partition("tokens came from")
        assert max(map(len, tables.partition("Same text")[0].splitlines())) <= 80
        for prompt in TWO[1::2]:
            assert prompt + harmless(stock_text(prompt, 16)) in result.stdout
        assert "Same text: 2 of 2 are plain generate()'s, token for token" in result.stdout
        assert "Too few tokens to say" in result.stdout

    def test_the_embedded_model_is_the_default(self, run, quiet):
        asked = ("--max-new-tokens", "40", "--seconds", "1", "--budget", "fixed")
        result = run("demo", *asked)
        assert result.exit_code == 0
        said = " ".join(result.stdout.split())
        assert all(snippet.kind in said for snippet in SNIPPETS)
        assert f"Same text: {len(SNIPPETS)} of {len(SNIPPETS)}" in said
        assert "sampling at temperature 0.5, seed 1" in said
        assert "speed-up" in said
        assert said.endswith("measure yours with 'selfspec check your/model'.")

    def test_where_nothing_is_drafted_it_fails(self, run, plain_folder, quiet):
        result = run("demo", plain_folder, *FEW, *TWO, "--sources", "")
        assert result.exit_code == 1
        assert "Nothing was drafted: " in result.stdout
        assert "speed-up" not in result.stdout

    def test_the_models_own_generation_config_is_the_default(self, run, plain_folder, tmp_path):
        folder = tmp_path / "sampling"
        shutil.copytree(plain_folder, folder)
        config = {"do_sample": True, "temperature": 0.5, "eos_token_id": 1, "pad_token_id": 0}
        (folder / "generation_config.json").write_text(json.dumps(config))
        asked = ("demo", folder, *FEW, *TWO)
        assert "sampling at temperature 0.5, seed 1" in run(*asked, "--seed", "1").stdout
        assert ", greedy" in run(*asked, "--temperature", "0").stdout

    def test_another_text_is_told_and_fails(self, run, plain_folder, monkeypatch):
        def other(self, ids, spec, **options):
            new_ids = own_ids(self, ids, spec, **options)
            return [*new_ids[:3], (new_ids[3] + bool(spec)) % 300, *new_ids[4:]]

        own_ids = stopwatch.Writer.new_ids
        monkeypatch.setattr(stopwatch.Writer, "new_ids", other)
        asked = ("demo", plain_folder, *FEW, *TWO, "--budget", "fixed")
        result = run(*asked)
        assert result.exit_code == 1
        said = " ".join(result.stdout.split())
        assert "NOT the same text: 0 of 2" in said
        assert "(the quick brown at token 4, def read( at token 4)" in said
        result = run(*asked, "--dtype", "bfloat16")
        assert result.exit_code == 0
        assert "texts may part where two tokens are almost equally likely" in " ".join(
            result.stdout.split()
        )

    def test_a_terminal_gets_colours_and_a_legend(self, writer):
        out = StringIO()
        for settings in ({"no_color": True}, {"color_system": "standard"}):
            out = StringIO()
            console = Console(file=out, force_terminal=True, width=80, **settings)
            ids = writer.encode("the quick")
            config = SelfSpec().config
            check_command._show(console, writer, config, [(Question("one", "the quick"), ids)])
            assert ("drafted by \x1b[36mlut\x1b[0m" in out.getvalue()) == (
                "no_color" not in settings
            )


def test_rounds_start_cold_and_take_turns(writer, monkeypatch):
    calls = []

    def noted(_writer, spec, ids, *_):
        calls.append((ids[0], spec))
        return TimedAnswer([1], 1.0, 1.0)

    monkeypatch.setattr(stopwatch, "_answer", noted)
    monkeypatch.setattr(stopwatch, "_processor_share", lambda _model: [1.0])
    asked = [(Question("a", "a"), [5]), (Question("b", "b"), [6])]
    measure(writer, asked, {DRAFTED: SelfSpec}, num_new=9, seconds=0)
    assert [prompt for prompt, _ in calls] == [5, 5, 6, 6] * 2
    drafts = [spec is not None for _, spec in calls]
    assert drafts == [False, True, True, False, True, False, False, True]
    specs = [spec for _, spec in calls if spec is not None]
    assert specs[0] is specs[1]
    assert specs[2] is specs[3]
    assert specs[0] is not specs[2]


def test_origins_add_up_to_all_tokens(writer):
    ids = writer.encode("the quick brown fox")
    found = measure(writer, [(Question("a", "a"), ids)], {DRAFTED: SelfSpec}, num_new=24, seconds=0)
    (prompt,) = found.prompts
    assert prompt.answers[DRAFTED][0].origins.total() == 24
    assert TimedAnswer([1, 2, 3], 1.0, 1.0).origins == Counter({OWN: 3})
    assert prompt.parts_at is None


def measured(plain: list[float], drafted: list[float], **more) -> Comparison:
    values = {name: more.pop(name) for name in ("dtype", "shares") if name in more}
    stats = GenerationStats(num_new_tokens=150, num_steps=more.pop("steps", 100))
    stats.drafted_by_source["lut"] = more.pop("drafts", 9)
    answers = {PLAIN: [TimedAnswer([1] * 101, 0.0, each) for each in plain]}
    for way, seconds in {DRAFTED: drafted, **more}.items():
        answers[way] = [TimedAnswer([1] * 101, 0.0, each, stats) for each in seconds]
    return Comparison(**{"dtype": "float32", **values}, prompts=[ComparedPrompt("a", answers)])


@pytest.fixture
def advice(writer):
    """The lines of Python for a model of that name."""

    def lines(found: Comparison, **asked) -> list[str]:
        writer.asked = replace(writer.asked, model="me/model", **asked)
        return python_lines(writer, found, verdict(found))

    return lines


def test_a_gain_says_how_sure_it_is_with_the_lines_that_bring_it(advice):
    best = measured([1.8, 2.0, 1.9], [1.0, 1.0, 1.0])
    said = verdict(best)
    assert said.gains
    assert said.text == (
        "1.90x faster with selfspec, in float32 (1.79x to 2.02x in 3 rounds of 101 tokens; single "
        "prompts 1.90x to 1.90x)."
    )
    assert advice(best) == [
        'model = AutoModelForCausalLM.from_pretrained("me/model", dtype="float32")',
        "selfspec.attach(model, selfspec.SelfSpec())",
    ]
    streamed, _ = advice(best, max_memory="25%")
    assert streamed == 'model = selfspec.load("me/model", max_memory="25%")'


def test_a_cache_that_gains_is_named_in_the_advice(advice):
    best = measured([2.0, 2.0], [1.6, 1.6], **{CACHED: [1.0, 1.0]})
    text = verdict(best).text
    assert text.startswith("2.00x faster with selfspec and the cache (1.25x without it), in float3")
    lines = advice(best, cache="my/cache")
    assert 'SelfSpec.from_pretrained("my/cache", tokenizer=tokenizer)' in lines[-1]


@pytest.mark.parametrize(
    ("steps", "curve", "why"),
    [
        (147, CURVE, "these answers are hard to guess: a step bro"),
        (100, CostCurve({1: 0.01, 4: 0.03}), "one of four tokens takes 3.0 plain"),
        (100, None, "drafts cost about as much as they save"),
    ],
)
def test_no_gain_has_a_reason(advice, steps, curve, why):
    found = measured([1.0, 1.0], [1.0, 1.0], steps=steps)
    text = verdict(found, curve).text
    assert text.startswith("No gain here (1.00x to 1.00x in float32, in 2 rounds of 101")
    assert why in text
    assert "not known to gain" in advice(found)[-1]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (measured([1.0, 1.2], [1.0, 1.0]), "Not sure: 0.91x to 1.31x in float32"),
        (measured([1.0, 2.0], [0.1, 0.1]), "Too busy to say: two plain runs of one prompt differ"),
        (measured([9, 9], [1, 1], shares=[0.5, 0.9, 0.4]), "Too busy to say: this process got 50%"),
        (measured([9, 9], [1, 1], drafts=0), "Nothing was drafted: no step was worth a draft"),
    ],
)
def test_what_is_not_sure_is_not_praised(found, text):
    said = verdict(found)
    assert said.text.startswith(text)
    assert not said.gains


def test_few_tokens_are_no_basis():
    answers = {way: [TimedAnswer([1] * 20, 0.0, 1.0)] * 2 for way in (PLAIN, DRAFTED)}
    answers[DRAFTED][0].stats.drafted_by_source["lut"] = 1
    text = verdict(Comparison("float32", [ComparedPrompt("a", answers)])).text
    assert text.startswith("Too few tokens to say: the answers have 20 in all")


def test_answers_of_different_lengths_are_compared_by_their_tokens():
    plain, drafted = TimedAnswer([1] * 11, 1.0, 10.0), TimedAnswer([1] * 6, 1.0, 2.0)
    assert ComparedPrompt("a", {PLAIN: [plain], DRAFTED: [drafted]}).speed_up(DRAFTED) == 11 / 5


def test_where_texts_part():
    def found(*drafted: list[int]) -> ComparedPrompt:
        answers = {PLAIN: [[1, 2, 3]] * len(drafted), DRAFTED: drafted}
        return ComparedPrompt(
            "a", {way: [TimedAnswer(each, 0, 1) for each in ids] for way, ids in answers.items()}
        )

    assert found([1, 2, 3], [1, 2, 3]).parts_at is None
    assert found([1, 2, 3], [1, 9, 3]).parts_at == 1
    assert found([1, 2]).parts_at == 2
    console = Console(file=StringIO(), width=200)
    assert print_texts(console, Comparison("float32", [found([1, 2, 3])]))
    assert not print_texts(console, Comparison("float32", [found([1, 2])]))


def test_bars_are_to_scale():
    assert bars(CURVE)[::2] == ["   1   1.00 " + "█" * 20, "  64   2.50 " + "█" * 50]


def test_the_share_of_the_processor_is_one_at_most():
    (share,) = stopwatch._processor_share(torch.nn.Linear(1, 1).weight)
    assert 0 < share < 1.2
