"""`python -m eval run`, end to end on tiny models: what it writes, and what no stop can take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.command import main
from eval.methods import method as methods
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


def summary_of(output: str) -> dict:
    """The file that the last line of a run's output names; `overall` has the overall figures."""
    last = json.loads(output.splitlines()[-1])
    found = json.loads(Path(last["summary"]).read_text())
    return {**found, "overall": {n: parts["overall"] for n, parts in found["methods"].items()}}


@pytest.mark.slow
def test_the_embedded_model_on_a_bench_that_needs_no_file(tmp_path, capsys):
    options = ["run", "--bench", "code-stdlib", "--output", str(tmp_path), "--limit", "3"]
    names = "stock,prompt-lookup,selfspec,stock-static,diaa,switch"
    assert main([*options, "--max-new-tokens", "16", "--methods", names]) == 0
    printed = capsys.readouterr()
    assert "no chat template is used" in printed.err
    assert re.search(r"\[3/3\] docstring 80, \d+ tokens: stock [\d.]+ ms a token", printed.err)
    assert "# tiny on code-stdlib, cold" in printed.out
    last = summary_of(printed.out)
    for name in set(last["overall"]) - {"stock", "stock-static"}:
        assert last["overall"][name]["num_same"] == 3, name
    reason = "transformers does not compile LlamaForCausalLM on cpu"
    assert last["left_out"] == {"stock-static": reason}
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["report.html", "report.md", ROWS, "summary.json"]


def test_stocks_answer_is_fed_back_to_all_and_methods_take_turns(asked, out, capsys, measuring):
    assert asked("--limit", "3", "--methods", "selfspec,stock,prompt-lookup") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert len(last) < 500
    told = json.loads(last)
    assert told["summary"] == str(out / "summary.json")
    assert told["overall"]["stock"] == {"tokens_per_step": 1, "speed_up": None, "num_failed": 0}
    record = read_record(out)
    prompts = {place: text["prompt_ids"] for place, text in record.texts.items()}
    first, second = prompts[0, 0][0], prompts[0, 1][0]
    assert second[: len(first)] == first
    answer = record.texts[0, 0]["output_ids"][0]
    assert len(second) > len(first) + len(answer) - 1
    same = record.frame.groupby("method").same.agg(lambda found: set(found.dropna()))
    others = {name: {"identical"} for name in ("selfspec", "prompt-lookup")}
    assert same.to_dict() == {"stock": set(), **others}
    first_turns = record.frame[record.frame.turn == 0]
    assert list(first_turns.groupby("method").order.agg(sorted)) == [[0, 1, 2]] * 3
    lengths = record.frame.num_prompt_tokens
    assert lengths.min() <= record.curve["num_columns"] <= lengths.max()


def test_a_killed_run_goes_on_and_learns_again_what_it_had_learned(
    asked, out, tmp_path, monkeypatch
):
    whole = tmp_path / "whole"
    options = ("--limit", "6", "--budget", "fixed")  # A measured one goes by the clock.
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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert asked(*options) == 0
    assert path.read_bytes().startswith(lines)
    assert sorted(map(str, keys(out))) == sorted(map(str, keys(whole)))
    for key, answer in read_record(whole).answers.items():
        again = read_record(out).answers[key]["numbers"]
        for name in ("num_steps", "output_sha256"):  # So it knew the same.
            assert again[name] == answer["numbers"][name]


def test_rounds_start_from_the_same_state_and_more_of_them_make_a_run_longer(asked, out, capsys):
    short = ("--limit", "2", "--turns", "1", "--budget", "fixed", "--methods", "stock,selfspec")
    assert asked(*short, "--rounds", "2") == 0
    assert asked(*short, "--rounds", "3") == 0
    printed = capsys.readouterr()
    assert "round 3 of 3" in printed.err
    assert "Stock's own times for the same question vary by" in printed.out
    answers = read_record(out).frame
    assert len(answers) == 2 * 2 * 3
    steps = answers.groupby(["question", "method"]).num_steps.nunique()
    assert (steps == 1).all(), "nothing is learned from round to round"


def test_what_is_done_is_skipped_a_longer_run_does_the_rest_and_another_one_is_refused(
    asked, out, capsys
):
    asked("--limit", "2")
    before = (out / ROWS).read_bytes()
    asked("--limit", "2")
    for more in (("--max-new-tokens", "4"), ("--knob", "top_k=3"), ("--seed", "1")):
        assert asked("--limit", "2", *more) == 2
        name = "knobs" if more[0] == "--knob" else more[0].strip("-").replace("-", "_")
        assert f"error: {name} must be what it was" in capsys.readouterr().err
    assert (out / ROWS).read_bytes() == before
    asked("--limit", "3")
    assert (out / ROWS).read_bytes().startswith(before)
    assert len({key[0] for key in keys(out)}) == 3
    assert json.loads((out / "summary.json").read_text())["settings"]["limit"] == 3


def test_a_method_that_fails_has_a_row_that_says_so(asked, out, monkeypatch, capsys):
    answer = methods.Method.answer

    def fails(self, model, ids, **more):
        if self.name == "prompt-lookup" and more["seed"] == 12:
            raise RuntimeError("out of\nmemory")
        return answer(self, model, ids, **more)

    monkeypatch.setattr(methods.Method, "answer", fails)
    assert asked("--limit", "2") == 0
    failed = [line for line in read_record(out).answers.values() if "error" in line]
    error = "RuntimeError: out of memory"
    assert {(each["method"], each["error"]) for each in failed} == {("prompt-lookup", error)}
    assert [each["questions"] for each in failed] == [[100], [100]]
    assert "prompt-lookup FAILED" in capsys.readouterr().err
    assert f"- prompt-lookup, 2 answers: {error}" in (out / "report.md").read_text()


def test_sampling_draws_the_same_for_all(asked, out):
    names = "stock,selfspec,prompt-lookup"
    assert asked("--limit", "3", "--temperature", "0.9", "--methods", names) == 0
    same = read_record(out).frame.groupby("method").same.agg(lambda found: set(found.dropna()))
    # Prompt lookup draws otherwise, as stock means it to.
    assert same.to_dict() == {"stock": set(), "selfspec": {"identical"}, "prompt-lookup": set()}


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
    output = capsys.readouterr().out
    last = summary_of(output)
    assert f"- study: {STUDIES['starts'].title}" in output
    assert list(last["overall"]) == ["stock", "cold", "own"]
    assert all(each["num_failed"] == 0 for each in last["overall"].values())
    assert last["settings"]["variants"]["own"]["cache"] == "own"
    assert last["settings"]["state"] == "prebuilt where a method names a cache, else cold"


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
