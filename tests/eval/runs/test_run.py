"""`python -m eval run`, end to end on tiny models: what it writes, and what no stop can take."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.benches.questions import Question
from eval.command import main
from eval.methods import method as methods
from eval.methods.reported import REPORTED
from eval.methods.studies import STUDIES, named_study
from eval.report.rows import ROWS, read_record
from eval.runs import contest, run
from eval.runs.asked import Asked
from eval.runs.batches import Batch
from eval.runs.stage import check_methods
from selfspec import SelfSpec, SpecConfig
from selfspec.run.costs import context_bucket

PUBLISHED = "diaa,lut-static,lut-tree,self-draft,suffix-branches,switch"


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
def test_all_methods_on_the_embedded_model(tmp_path, capsys):
    options = ["run", "--bench", "code-stdlib", "--output", str(tmp_path), "--limit", "3"]
    names = f"stock,prompt-lookup,selfspec,stock-static,{PUBLISHED}"
    assert main([*options, "--max-new-tokens", "16", "--methods", names]) == 0
    printed = capsys.readouterr()
    assert "state: cold" in printed.err
    assert "no chat template is used" in printed.err
    assert re.search(
        r"\[3/3\] docstring 80, \d+ tokens: stock [\d.]+ ms, prompt-lookup [\d.]+ ms [\d.]+x",
        printed.err,
    )
    assert "# tiny on code-stdlib, cold" in printed.out
    last = summary_of(printed.out)
    overall = last["overall"]
    assert list(overall) == names.split(",")
    for name in set(overall) - {"stock", "stock-static"}:
        assert overall[name]["num_same"] == 3, name
        assert overall[name]["tokens_per_step"] >= 1
    assert overall["stock"]["tokens_per_step"] == 1
    assert overall["lut-static"]["queries_per_step"] > overall["selfspec"]["queries_per_step"]
    reason = "transformers does not compile LlamaForCausalLM on cpu"
    assert last["left_out"] == {"stock-static": reason}
    assert last["errors"] == {"stock-static": {reason: 3}}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "report.html",
        "report.md",
        ROWS,
        "summary.json",
    ]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 7
    assert "http" not in page  # it needs nothing but itself


def test_stocks_answer_is_fed_back_to_all(asked, out):
    assert asked("--limit", "2", "--methods", "selfspec,stock,prompt-lookup") == 0
    record = read_record(out)
    assert {key.turn for key in record.answers} == {0, 1}
    prompts = {place: text["prompt_ids"] for place, text in record.texts.items()}
    first, second = prompts[0, 0][0], prompts[0, 1][0]
    assert second[: len(first)] == first
    answer = record.texts[0, 0]["output_ids"][0]
    assert len(second) > len(first) + len(answer) - 1
    assert {a.numbers.same for a in record.answers.values() if a.method != "stock"} == {"identical"}
    assert {a.numbers.same for a in record.answers.values() if a.method == "stock"} == {None}


def test_methods_take_turns_and_a_curve_and_a_short_last_line_are_told(asked, out, capsys):
    assert asked("--limit", "3", "--turns", "1") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert len(last) < 500
    told = json.loads(last)
    assert told["summary"] == str(out / "summary.json")
    assert told["overall"]["stock"] == {"tokens_per_step": 1, "speed_up": None, "num_failed": 0}
    assert told["overall"]["selfspec"]["speed_up"] > 0
    record = read_record(out)
    places: dict = {}
    for key, answer in record.answers.items():
        places.setdefault(key.method, []).append(answer.order)
    assert all(sorted(given) == [0, 1, 2] for given in places.values())
    lengths = [a.numbers.num_prompt_tokens for a in record.answers.values()]
    assert min(lengths) <= record.curve["num_columns"] <= max(lengths)
    assert record.curve["widths"][0] == 1


def test_every_count_is_there(asked, out):
    asked("--limit", "1", "--turns", "1", "--budget", "fixed", "--knob", "num_branches=2")
    answers = {key.method: answer.numbers for key, answer in read_record(out).answers.items()}
    ours, stock, lookup = (answers[name] for name in ("selfspec", "stock", "prompt-lookup"))
    assert stock.num_steps == 7
    assert 1 <= lookup.num_steps <= 7
    assert ours.num_steps == sum(ours.accepted_lengths.values()) == sum(ours.widths.values())
    assert ours.num_nodes == sum(width * count for width, count in ours.widths.items())
    assert ours.num_branch_queries > 0
    assert {"forward", "draft", "verify"} <= set(ours.stage_seconds)
    assert stock.output_sha256 == ours.output_sha256
    assert 0 < ours.prefill_seconds < ours.seconds


def test_a_killed_run_goes_on_and_learns_again_what_it_had_learned(
    asked, out, tmp_path, monkeypatch
):
    whole = tmp_path / "whole"
    options = ("--limit", "6", "--budget", "fixed")  # a measured one goes by the clock
    asked(*options, output=whole)
    answered = contest.Contest.answer
    count = iter(range(100))

    def stops(self, batch):
        if next(count) == 4:  # the warm-up is the first
            raise KeyboardInterrupt
        return answered(self, batch)

    monkeypatch.setattr(contest.Contest, "answer", stops)
    assert asked(*options) == 130
    monkeypatch.undo()
    path = out / ROWS
    lines = path.read_bytes()
    assert len(keys(out)) == 3 * 2 * 3
    assert not (out / "summary.json").exists()
    path.write_bytes(lines + b'{"torn')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert asked(*options) == 0
    assert path.read_bytes().startswith(lines)
    assert sorted(map(str, keys(out))) == sorted(map(str, keys(whole)))
    for key, answer in read_record(whole).answers.items():
        again = read_record(out).answers[key]
        assert again.numbers.num_steps == answer.numbers.num_steps  # so it knew the same
        assert again.numbers.output_sha256 == answer.numbers.output_sha256


def test_rounds_start_from_the_same_state_and_more_of_them_make_a_run_longer(asked, out, capsys):
    short = ("--limit", "2", "--turns", "1", "--budget", "fixed", "--methods", "stock,selfspec")
    assert asked(*short, "--rounds", "2") == 0
    assert asked(*short, "--rounds", "3") == 0
    printed = capsys.readouterr()
    assert "2 questions" in printed.err
    assert "round 3 of 3" in printed.err
    assert "Stock's own times for the same question vary by" in printed.out
    answers = read_record(out).answers
    assert len(answers) == 2 * 2 * 3
    steps: dict = {}
    for key, each in answers.items():
        steps.setdefault((key.questions, key.method), set()).add(each.numbers.num_steps)
    assert {len(counts) for counts in steps.values()} == {1}, (
        "nothing is learned from round to round"
    )
    assert {key.round for key in answers} == {0, 1, 2}


def test_a_run_that_is_done_measures_nothing_and_a_longer_one_the_rest(asked, out, monkeypatch):
    asked("--limit", "2")
    before = (out / ROWS).read_bytes()
    asked("--limit", "2")
    assert (out / ROWS).read_bytes() == before
    asked("--limit", "3")
    assert (out / ROWS).read_bytes().startswith(before)
    assert len({key[0] for key in keys(out)}) == 3
    assert json.loads((out / "summary.json").read_text())["settings"]["limit"] == 3


@pytest.mark.parametrize(
    "more", [("--max-new-tokens", "4"), ("--knob", "top_k=3"), ("--seed", "1")]
)
def test_other_settings_are_refused_by_name(asked, out, capsys, more):
    asked("--limit", "1")
    before = (out / ROWS).read_bytes()
    assert asked("--limit", "1", *more) == 2
    name = "knobs" if more[0] == "--knob" else more[0].strip("-").replace("-", "_")
    assert f"error: {name} must be what it was" in capsys.readouterr().err
    assert (out / ROWS).read_bytes() == before


def test_shards_answer_their_own_questions_and_the_last_one_reports(
    asked, out, monkeypatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert asked("--limit", "3", "--turns", "1") == 0
        assert (out / "summary.json").exists() == (rank == "0")
    assert "shard 1 of 2 is done" in capsys.readouterr().out
    assert {path.name for path in out.glob("rows*")} == {
        ROWS,
        "rows.0-of-2.jsonl",
        "rows.1-of-2.jsonl",
    }
    assert "2 processes at once" in (out / "report.md").read_text()
    merged = [json.loads(line) for line in (out / ROWS).read_text().splitlines()]
    assert sum(line["kind"] == "answer" for line in merged) == 9
    assert len(keys(out)) == 9


@pytest.fixture
def failing(monkeypatch):
    """Makes a method fail on a question, or on all."""
    answer = methods.Method.answer

    def fail(name: str, seed: int | None = None) -> None:
        def fails(self, model, ids, **more):
            if self.name == name and seed in (None, more["seed"]):
                raise RuntimeError("out of\nmemory")
            return answer(self, model, ids, **more)

        monkeypatch.setattr(methods.Method, "answer", fails)

    return fail


def test_a_method_that_fails_has_a_row_that_says_so(asked, out, failing, capsys):
    failing("prompt-lookup", seed=12)
    assert asked("--limit", "2") == 0
    failed = [a for a in read_record(out).answers.values() if a.error is not None]
    error = "RuntimeError: out of memory"
    assert {(a.method, a.questions, a.error) for a in failed} == {("prompt-lookup", (100,), error)}
    assert "prompt-lookup FAILED" in capsys.readouterr().err
    assert f"- prompt-lookup, 2 answers: {error}" in (out / "report.md").read_text()


def test_where_stock_fails_the_others_are_not_compared(asked, out, failing):
    failing("stock")
    assert asked("--limit", "1") == 0
    figures = json.loads((out / "summary.json").read_text())["methods"]["selfspec"]["overall"]
    assert figures["speed_up"] is None
    assert figures["num_answers"] == 2


def test_batches(asked, out):
    assert asked("--task", "qa", "--batch-size", "5", "--limit", "7", "--turns", "1") == 0
    record = read_record(out)
    assert {key.questions for key in record.answers} == {(100, 101, 102, 103, 104), (105, 106)}
    by_method = {key.method: a for key, a in record.answers.items()}
    assert "only supported" in by_method["prompt-lookup"].error  # stock's own says so
    ours = by_method["selfspec"].numbers
    assert ours.same == "identical"
    assert ours.num_new_tokens == 16


def test_sampling_draws_the_same_for_all(asked, out):
    methods = "stock,selfspec,prompt-lookup"
    assert asked("--limit", "3", "--temperature", "0.9", "--methods", methods) == 0
    verdicts: dict = {}
    for answer in read_record(out).answers.values():
        verdicts.setdefault(answer.method, set()).add(answer.numbers.same)
    # prompt lookup draws otherwise, as stock means it to
    assert verdicts == {"stock": {None}, "selfspec": {"identical"}, "prompt-lookup": {None}}


def test_a_warmed_state_takes_other_questions(asked, out, capsys):
    assert asked("--limit", "3", "--warm-up", "3", "--turns", "1") == 0
    printed = capsys.readouterr()
    assert "state: warmed (on 3 other questions)" in printed.err
    assert "warmed (on 3 other questions)" in printed.out
    assert {key[0] for key in keys(out)} == {(1,), (101,), (201,)}


@pytest.mark.slow
def test_turns_that_outgrow_the_positions_fail_alone(asked, out):
    assert asked("--limit", "1", "--max-new-tokens", "480") == 0
    answers = read_record(out).answers
    errors = {key.turn: answer.error for key, answer in answers.items()}
    assert errors[0] is None
    assert "must fit into the model's 512 positions" in errors[1]


def test_without_a_template_the_model_goes_on_with_plain_text(asked, plain_folder, capsys):
    assert asked("--model", plain_folder, "--limit", "1", "--turns", "1") == 0
    assert "no chat template is used" in capsys.readouterr().err


def test_a_full_disk_keeps_the_rows(asked, out, monkeypatch, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eval.report.pages.replace_text", full)
    assert asked("--limit", "1") == 2
    fix = "the rows are all there: make room, and 'python -m eval report"
    assert fix in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").exists()


def test_a_prebuilt_state_is_named(asked, out, chat_folder, tmp_path, capsys):
    tokenizer, mine = AutoTokenizer.from_pretrained(chat_folder), tmp_path / "mine"
    SelfSpec().save_pretrained(mine, tokenizer=tokenizer)
    assert asked("--limit", "1", "--cache", str(mine), "--methods", "stock,lut-tree") == 0
    assert "prebuilt (mine)" in (out / "report.md").read_text()
    assert read_record(out).runs[0]["environment"]["cache_sha256"]


def test_the_curve_that_the_run_went_by_is_not_measured_again(asked, out, monkeypatch, measuring):
    def measured(*_args, **_more):
        raise AssertionError("there is one")

    monkeypatch.setattr("eval.runs.stage.profile", measured)
    assert asked("--limit", "1", "--turns", "1", "--max-new-tokens", "100") == 0
    kept = Path(os.environ["XDG_CACHE_HOME"]) / "selfspec" / "measured.json"
    curve = read_record(out).curve
    first, _ = context_bucket(curve["num_columns"])
    (curves,) = (entry["values"] for entry in json.loads(kept.read_text())["entries"].values())
    values = curves[str(first)]
    assert values == {name: curve[name] for name in values}


def test_the_longest_of_each_order_of_length_warms_up():
    def batch(number: int, letters: int) -> Batch:
        return Batch(number, number, (Question(number, "qa", ("x" * letters,)),), 1)

    own = [batch(n, letters) for n, letters in enumerate((9, 30, 15, 20, 8))]
    assert [each.number for each in run._longest_of_each_order(own)] == [1, 2]


@pytest.fixture
def study(chat_folder, questions, tmp_path):
    """The words of a small study."""
    more = ["--model", chat_folder, "--bench", "spec-bench", "--questions", str(questions)]
    more += ["--output", str(tmp_path / "out"), "--limit", "1", "--max-new-tokens", "8"]
    return lambda name: ["study", name, *more]


def test_a_study_is_a_run_of_variants(study, tmp_path, capsys):
    options = study("parts")
    assert main([*options, "--max-nodes", "4"]) == 0
    out = capsys.readouterr().out
    assert "- study: what LUTs and dynamic trees are worth (after DIAA, table 3)" in out
    report = (tmp_path / "out" / "report.md").read_text()
    assert re.search(r"^\| LUT, static tree \|.*\| -15 % \|$", report, re.MULTILINE)
    last = summary_of(out)
    named = ["all", "no LUTs", "no overlap", "DIAA"]
    named += ["DIAA, read otherwise", "DIAA, no threshold", "LUT, static tree", "neither"]
    assert list(last["overall"]) == ["stock", *named]
    assert last["settings"]["variants"]["neither"] == {
        "method": "prompt-lookup",
        "knobs": {},
        "cache": None,
    }
    answers = read_record(tmp_path / "out").answers.values()
    static = [each.numbers.widths for each in answers if each.method == "LUT, static tree"]
    assert max(map(max, static)) > 8, "it must not keep the shape of the first tree, which is tiny"
    assert all(each["num_failed"] == 0 for each in last["overall"].values())
    assert last["overall"]["all"]["queries_per_step"] <= 4


def test_the_study_of_tables_says_what_they_take(study, capsys):
    options = study("tables")
    assert main(options) == 0
    output = capsys.readouterr().out
    lines, overall = output.splitlines(), summary_of(output)["overall"]
    below = lines[next(n for n, line in enumerate(lines) if "LUTs, MB" in line) :]
    head = below[0].strip("| ").split(" | ")
    assert "rounds" not in head, "there was one round, so the column says nothing"
    row = next(line.strip("| ").split(" | ") for line in below if line.startswith("| top 16 | "))
    taken = overall["top 16"]["table_bytes"]
    assert row[head.index("LUTs, MB")] == f"{taken / 1e6:.1f}"
    assert taken > overall["top 2"]["table_bytes"] > 0
    assert overall["stock"]["table_bytes"] is None


def test_a_study_of_caches_has_one_more_for_each(study, chat_folder, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    model = AutoModelForCausalLM.from_pretrained(chat_folder)
    spec = SelfSpec()
    ids = tokenizer("def read(self)", return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=spec)
    spec.save_pretrained(tmp_path / "own", tokenizer=tokenizer)
    options = study("starts")
    assert main([*options, "--caches", str(tmp_path / "own")]) == 0
    output = capsys.readouterr().out
    last = summary_of(output)
    assert list(last["overall"]) == ["stock", "cold", "own"]
    assert all(each["num_failed"] == 0 for each in last["overall"].values())
    assert last["settings"]["variants"]["own"]["cache"] == "own"
    assert read_record(tmp_path / "out").runs[0]["settings"]["state"].startswith("prebuilt")
    assert last["settings"]["state"] == "prebuilt where a method names a cache, else cold"
    assert "weighed by what came true, budget = fixed, cache own" in output


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_names_methods_and_knobs_that_there_are(name, tmp_path):
    study = named_study(name)
    assert next(iter(study.variants)) == "stock"
    asked = Asked(
        bench="code-stdlib",
        output=tmp_path,
        methods=tuple(study.variants),
        variants=study.variants,
    )
    check_methods(asked)
    json.dumps(asked.settings())
    if name in REPORTED:
        assert set(REPORTED[name].figures) <= set(study.variants)


@pytest.mark.parametrize(
    "name", ["branches", "memories", "parts", "shapes", "starts", "tables", "widths"]
)
def test_what_is_compared_rides_along_in_every_step(name):
    """A measured budget leaves branches out, and picks widths of its own."""
    ours = [each for each in STUDIES[name].variants.values() if each.method == "selfspec"]
    assert ours
    assert {SpecConfig.of(**each.knobs).budget for each in ours} == {"fixed"}
