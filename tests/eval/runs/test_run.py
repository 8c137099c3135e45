"""`python -m eval run`, end to end on tiny models: what it writes, and what no stop can take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.command import main
from eval.methods.method import Method
from eval.methods.registry import METHODS
from eval.methods.reported import REPORTED
from eval.methods.studies import STUDIES, named_study
from eval.report.rows import ROWS, read_record
from eval.runs import contest
from eval.runs.asked import Asked
from eval.runs.stage import check_methods
from selfspec import SelfSpec, attach


@pytest.fixture
def asked(chat_folder, questions, tmp_path):
    """Runs on Spec-Bench questions with a chat model; returns the exit status."""

    def go(*more: str, output: Path = tmp_path / "out") -> int:
        options = ["run", "--model", chat_folder, "--bench", "spec-bench", "--questions"]
        options += [str(questions), "--output", str(output), "--max-new-tokens", "8"]
        return main([*options, *(more or ("--limit", "3"))])

    return go


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def keys(out: Path) -> list[tuple]:
    return [tuple(key) for key in read_record(out).answers]


class Broken(Method):
    def answer(self, model, ids, **more):
        if more["seed"] == 12:
            raise RuntimeError("out of\nmemory")
        return super().answer(model, ids, **more)


def test_stocks_answer_is_fed_back_to_all_and_methods_take_turns(
    asked, out, capsys, measuring, monkeypatch
):
    """A method that fails has a row that says so."""
    monkeypatch.setitem(METHODS, "broken", lambda _: Broken("broken"))
    assert asked("--limit", "3", "--methods", "selfspec,stock,prompt-lookup,broken") == 1
    printed = capsys.readouterr()
    overall = json.loads(printed.out.splitlines()[-1])["overall"]
    assert overall["stock"] == {"tokens_per_step": 1, "speed_up": None, "num_failed": 0}
    record = read_record(out)
    prompts = {place: text["prompt_ids"] for place, text in record.texts.items()}
    first, second = prompts[0, 0], prompts[0, 1]
    assert second[: len(first)] == first
    same = record.frame.groupby("method").same.agg(lambda found: set(found.dropna()))
    others = {name: {"identical"} for name in ("selfspec", "prompt-lookup")}
    assert same.to_dict().items() >= {"stock": set(), **others}.items()
    first_turns = record.frame[record.frame.turn == 0].groupby("method")
    assert first_turns.order.nunique().max() > 1
    errors = {line["error"] for line in record.answers.values() if "error" in line}
    assert errors == {"RuntimeError: out of memory"}
    assert "broken FAILED" in printed.err
    assert "RuntimeError: out of memory" in (out / "report.md").read_text()


def test_a_killed_run_goes_on_and_learns_again_what_it_had_learned(
    asked, out, tmp_path, monkeypatch
):
    whole = tmp_path / "whole"
    options = ("--limit", "4", "--budget", "fixed")  # A measured one goes by the clock.
    asked(*options, output=whole)
    answered = contest.Contest.answer
    count = iter(range(100))

    def stops(self, planned):
        if next(count) == 4:  # The warm-up is the first.
            raise KeyboardInterrupt
        return answered(self, planned)

    monkeypatch.setattr(contest.Contest, "answer", stops)
    assert asked(*options) == 130
    monkeypatch.undo()
    path = out / ROWS
    lines = path.read_bytes()
    assert len(keys(out)) == 3 * 2 * 3
    path.write_bytes(lines + b'{"torn')
    assert asked(*options) == 0
    assert path.read_bytes().startswith(lines)
    assert sorted(map(str, keys(out))) == sorted(map(str, keys(whole)))
    for key, answer in read_record(whole).answers.items():
        again = read_record(out).answers[key]["numbers"]
        for name in ("num_steps", "output_sha256"):  # So it knew the same.
            assert again[name] == answer["numbers"][name]


def test_what_is_done_is_skipped_a_longer_run_does_the_rest_and_another_one_is_refused(
    asked, out, capsys
):
    """Rounds start from the same state, so nothing is learned from one to the next."""
    short = ("--turns", "1", "--budget", "fixed", "--methods", "stock,selfspec")
    asked(*short, "--limit", "2")
    before = (out / ROWS).read_bytes()
    asked(*short, "--limit", "2")
    for more in (("--max-new-tokens", "4"), ("--knob", "top_k=3"), ("--seed", "1")):
        assert asked(*short, "--limit", "2", *more) == 2
        name = "knobs" if more[0] == "--knob" else more[0].strip("-").replace("-", "_")
        assert f"error: {name} must be what it was" in capsys.readouterr().err
    assert (out / ROWS).read_bytes() == before
    asked(*short, "--limit", "3", "--rounds", "2")
    assert "Stock's own times for the same question vary by" in capsys.readouterr().out
    assert (out / ROWS).read_bytes().startswith(before)
    assert len({key[0] for key in keys(out)}) == 3
    steps = read_record(out).frame.groupby(["question", "method"]).num_steps
    assert list(steps.size()) == [2] * 3 * 2
    assert list(steps.nunique()) == [1] * 3 * 2


def test_a_study_is_a_run_of_variants_and_one_more_for_each_cache(
    chat_folder, questions, tmp_path, capsys
):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    model = attach(AutoModelForCausalLM.from_pretrained(chat_folder))
    spec = SelfSpec()
    ids = tokenizer("def read(self)", return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=24, do_sample=False, assistant=spec)
    spec.save_pretrained(tmp_path / "own", tokenizer=tokenizer)
    options = ["--model", chat_folder, "--bench", "spec-bench", "--questions", str(questions)]
    options += ["--output", str(tmp_path / "out"), "--limit", "1", "--max-new-tokens", "8"]
    assert main(["study", "starts", *options, "--caches", str(tmp_path / "own")]) == 0
    assert f"- study: {STUDIES['starts'].title}" in capsys.readouterr().out
    last = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(last["methods"]) == ["stock", "cold", "own"]
    assert last["settings"]["variants"]["own"]["cache"] == "own"


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_names_methods_and_knobs_that_there_are(name, tmp_path):
    study = named_study(name)
    assert next(iter(study.variants)) == "stock"
    variants = {"methods": tuple(study.variants), "variants": study.variants}
    asked = Asked(bench="code-stdlib", output=tmp_path, tree="tree.json", **variants)
    check_methods(asked)
    json.dumps(asked.settings())
    if name in REPORTED:
        assert set(REPORTED[name].figures) <= set(study.variants)
