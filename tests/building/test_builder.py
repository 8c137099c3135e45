"""A whole build: the same bytes however often it is interrupted, and by how many workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.building.builder import BuildOptions, command_of
from selfspec.building.grams import GramCounter
from selfspec.building.recipe import Recipe
from selfspec.cache import load_cache
from selfspec.errors import BuildError, CacheError
from tests.building.conftest import StoppingBars

PARAGRAPHS = {"form": "paragraph", "build": "ngrams"}
OWN = {"messages": "conversations", "learn_from": "generations", "max_new_tokens": 6}


class Killed(BaseException):
    """What nothing catches, as little as kill -9."""


def test_a_cache_of_both_kinds(tmp_path, build, lines, texts, tokenizer):
    build(tmp_path / "cache", data=str(lines), form="paragraph", licence="CC0")
    held = load_cache(tmp_path / "cache")
    assert held.corpus is not None
    assert held.calibration is None
    assert "lut" in held.tables
    about = held.about
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    assert (about["documents"], about["tokens"], about["tokens_read"]) == (9, tokens, tokens)
    assert (about["name"], about["licence"], about["left_out"]) == ("tiny", "CC0", 0)
    assert about["recipe"]["data"] == lines.name
    assert str(tmp_path) not in json.dumps(about)
    assert not (tmp_path / "cache.building").exists()


def test_the_ngrams_are_those_of_the_documents(tmp_path, build, lines, texts, tokenizer):
    build(tmp_path / "cache", data=str(lines), **PARAGRAPHS)
    counter = GramCounter(tmp_path / "runs", vocab_size=len(tokenizer))
    for text in texts:
        counter.add(tokenizer(text)["input_ids"])
    found, expected = load_cache(tmp_path / "cache").corpus.arrays(), counter.tables().arrays()
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in expected.items()
    }


def test_a_cache_of_own_answers(tmp_path, build, dialogue):
    build(tmp_path / "cache", data=str(dialogue), **OWN)
    held = load_cache(tmp_path / "cache")
    assert held.corpus is not None
    assert held.calibration
    about = held.about
    assert (about["prompts"], about["answers"], about["documents"]) == (6, 6, 6)
    assert about["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
@pytest.mark.parametrize("moves", [1, 2, 5, 8, 9])
def test_counting_interrupted_at_any_document(tmp_path, build, lines, moves, error):
    keys = {"data": str(lines), **PARAGRAPHS}
    whole = build(tmp_path / "whole", **keys)
    options = BuildOptions(max_memory=1)
    with pytest.raises(error):
        build(tmp_path / "parts", StoppingBars(moves, error), options, **keys)
    assert not (tmp_path / "parts").exists()
    if moves < 9:
        with pytest.raises(KeyboardInterrupt):  # and once more, one document on
            build(tmp_path / "parts", StoppingBars(1), options, **keys)
    assert build(tmp_path / "parts", **keys) == whole


@pytest.mark.parametrize("moves", [1, 5, 9])
def test_ctrl_c_amid_a_document_counts_no_part_of_it(tmp_path, build, lines, moves, monkeypatch):
    keys = {"data": str(lines), **PARAGRAPHS}
    whole = build(tmp_path / "whole", **keys)
    add, left = GramCounter.add, [moves]

    def torn(self, ids):
        left[0] -= 1
        add(self, ids if left[0] else ids[:3])
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(GramCounter, "add", torn)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "cache", **keys)
    monkeypatch.undo()
    assert build(tmp_path / "cache", **keys) == whole


@pytest.mark.parametrize("moves", [1, 3, 7, 9, 11, 14])
def test_own_answers_interrupted(tmp_path, build, dialogue, moves):
    keys = {"data": str(dialogue), **OWN}
    whole = build(tmp_path / "whole", **keys)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "parts", StoppingBars(moves), **keys)
    assert build(tmp_path / "parts", **keys) == whole


def test_an_interrupted_count_reads_on_and_not_again(tmp_path, build, lines, monkeypatch):
    keys = {"data": str(lines), **PARAGRAPHS}
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "cache", StoppingBars(6), **keys)
    bars = StoppingBars()
    started = []
    stage = bars.stage
    monkeypatch.setattr(bars, "stage", lambda *a, **k: started.append((a[0], k)) or stage(*a, **k))
    build(tmp_path / "cache", bars, **keys)
    assert started[0][0] == "counting"
    assert started[0][1]["done"] == 6


@pytest.mark.parametrize("max_memory", [3_000, 10**8])
def test_memory_changes_no_byte(tmp_path, build, lines, max_memory):
    keys = {"data": str(lines), "form": "paragraph"}
    whole = build(tmp_path / "one", **keys)
    options = BuildOptions(max_memory=max_memory)
    assert build(tmp_path / "other", options=options, **keys) == whole


@pytest.mark.parametrize("moves", [None, 3, 7, 9])
def test_parts_done_by_others_change_no_byte(tmp_path, build, lines, moves, monkeypatch):
    """And where they were interrupted, a build goes on alone."""
    monkeypatch.setattr("selfspec.building.builder._SHARD_DOCUMENTS", 2)
    keys = {"data": str(lines), "form": "paragraph", "warmup_tokens": 150}
    whole = build(tmp_path / "one", **keys)
    if moves is None:
        assert build(tmp_path / "other", by_workers=True, **keys) == whole
        return
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "other", StoppingBars(moves), by_workers=True, **keys)
    assert build(tmp_path / "other", **keys) == whole


def test_a_changed_recipe_or_input_is_refused(tmp_path, build, lines):
    keys = {"data": str(lines), **PARAGRAPHS}
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "cache", StoppingBars(3), **keys)
    with pytest.raises(BuildError, match=r"min_count was 2, is 3.*--restart"):
        build(tmp_path / "cache", **keys, min_count=3)
    lines.write_text(lines.read_text() + "\n\nmore")
    with pytest.raises(BuildError, match=r"files was .*--restart"):
        build(tmp_path / "cache", **keys)
    fresh = build(tmp_path / "fresh", **keys)
    options = BuildOptions(restart=True, max_memory=10_000)
    assert build(tmp_path / "cache", options=options, **keys) == fresh


def test_a_cache_that_is_there_stays_unless_asked(tmp_path, build, lines):
    keys = {"data": str(lines), **PARAGRAPHS}
    old = build(tmp_path / "cache", **keys)
    with pytest.raises(CacheError, match="must not be there yet"):
        build(tmp_path / "cache", **keys, min_count=3)
    new = build(tmp_path / "cache", options=BuildOptions(overwrite=True), **keys, min_count=3)
    assert new != old


def test_kept_work_can_be_built_from_again(tmp_path, build, dialogue):
    options = BuildOptions(keep_work=True, overwrite=True)
    first = build(tmp_path / "cache", options=options, data=str(dialogue), **OWN)
    answers = (tmp_path / "cache.building" / "generations.jsonl").read_text()
    assert answers.count("\n") == 6
    assert build(tmp_path / "cache", options=options, data=str(dialogue), **OWN) == first


@pytest.mark.parametrize("keys", [{}, {"build": "lut"}, {"learn_from": "generations"}])
def test_data_with_nothing_in_it(tmp_path, build, keys):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(BuildError, match="data must hold a "):
        build(tmp_path / "cache", data=str(tmp_path / "empty.txt"), **keys)
    assert not (tmp_path / "cache.safetensors").exists()


def test_conversations_need_a_template(tmp_path, build, dialogue, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    keys = {"data": str(dialogue), "messages": "conversations", "build": "ngrams"}
    with pytest.raises(BuildError, match=r"chat_template must be false .*--no-chat-template"):
        build(tmp_path / "cache", **keys)
    build(tmp_path / "cache", **keys, chat_template=False)


def test_the_command_on_the_card_makes_the_same_recipe():
    recipe = Recipe.of(
        name="my notes",
        data="json",
        data_files=["a.json", "b.json"],
        roles={"me": "user"},
        chat_template=False,
        seed=4,
    )
    assert command_of(recipe, "owner/name") == (
        "selfspec cache build FOLDER --model owner/name --name 'my notes' --data json "
        "--data-files a.json --data-files b.json --roles me=user --no-chat-template --seed 4"
    )


PROCESS = """
import sys
from pathlib import Path
from rich.console import Console
from selfspec.building.builder import Builder, BuildOptions
from selfspec.building.progress import Bars
from selfspec.building.recipe import Recipe
from tests.tiny import make_tokenizer

class Telling(Bars):
    def stage(self, *arguments, **more):
        bar = super().stage(*arguments, **more)
        advance = bar.advance
        def told(*amounts):
            advance(*amounts)
            print("moved", flush=True)
            sys.stdin.readline()
        bar.advance = told
        return bar

data, output = sys.argv[1:]
recipe = Recipe.of(name="tiny", data=data, form="paragraph", build="ngrams", window=16, batch=2)
options = BuildOptions(max_memory=1)
bars = Telling(Console(quiet=True))
Builder(recipe, make_tokenizer(), None, bars, options, model_name="tiny").run(Path(output))
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_and_going_on(tmp_path, lines, build):
    """Meanwhile nobody else builds there."""
    keys = {"data": str(lines), **PARAGRAPHS}
    whole = build(tmp_path / "whole", **keys)
    command = [sys.executable, "-c", PROCESS, str(lines), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as process:
        for _ in range(5):
            assert process.stdout.readline() == "moved\n"
            process.stdin.write("\n")
            process.stdin.flush()
        with pytest.raises(BuildError, match=f"is being built by process {process.pid} on"):
            build(tmp_path / "cache", **keys)
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "cache.safetensors").exists()
    journal = json.loads((tmp_path / "cache.building" / "journal.json").read_text())
    assert 0 < journal["progress"]["counting"]["documents"] < 9
    assert build(tmp_path / "cache", **keys) == whole
