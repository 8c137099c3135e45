"""The bench from end to end on a tiny random model: what it prints, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from eval import bench_step
from eval.figures import STAGES
from eval.interleaved import Asked, catch_up, first_difference, measure, warm_up
from eval.methods import METHODS, SelfSpecMethod, StockMethod, new_method
from eval.prompts import random_prompts
from eval.questions import Question
from selfspec import SelfSpec
from tests.fakes import prompt, tiny_model
from tests.tiny import make_tokenizer

ASKED = Asked(max_new_tokens=6, temperature=0.0, seed=0)


def prompts_of(*lengths: int):
    return [
        (Question(n, "qa", ()), prompt(length=length, seed=n)["input_ids"])
        for n, length in enumerate(lengths)
    ]


class Recorded(StockMethod):
    """Notes whom it was asked about, and may break."""

    def __init__(self, name: str, log: list, breaks_on: tuple[int, ...] = ()) -> None:
        super().__init__(name)
        self.log = log
        self.breaks_on = breaks_on

    def answer(self, model, ids, **asked):
        self.log.append((self.name, ids.shape[1], asked["seed"], asked["max_new_tokens"]))
        if ids.shape[1] in self.breaks_on:
            raise RuntimeError("out of\nluck")
        return super().answer(model, ids, **asked)

    def forget(self):
        self.log.append((self.name, "forget"))


def test_methods_answer_in_turns_and_with_the_same_seed():
    log = []
    methods = [Recorded(name, log) for name in ("stock", "b", "c")]
    rows = list(measure(tiny_model(), methods, prompts_of(9, 8, 7, 6), ASKED))
    assert [(name, seed) for name, _, seed, _ in log] == [
        *(("stock", 0), ("b", 0), ("c", 0)),
        *(("b", 1), ("c", 1), ("stock", 1)),
        *(("c", 2), ("stock", 2), ("b", 2)),
        *(("stock", 3), ("b", 3), ("c", 3)),
    ]
    assert all(answer.same for row in rows for answer in row.answers.values())
    assert [row.num_prompt_tokens for row in rows] == [9, 8, 7, 6]


def test_a_failed_answer_has_its_reason_and_no_figures():
    methods = [Recorded("stock", []), Recorded("b", [], breaks_on=(8,))]
    first, second = measure(tiny_model(), methods, prompts_of(9, 8), ASKED)
    assert first.answers["b"].error is None
    assert second.answers["b"].error == "RuntimeError: out of luck"
    assert second.answers["b"].seconds == second.answers["b"].num_new_tokens == 0
    assert second.answers["stock"].same is True


def test_nothing_is_compared_with_a_stock_that_failed():
    methods = [Recorded("stock", [], breaks_on=(9,)), Recorded("b", [])]
    (row,) = measure(tiny_model(), methods, prompts_of(9), ASKED)
    assert row.answers["b"].same is None
    assert row.answers["b"].num_new_tokens == 6


def test_the_warm_up_takes_the_longest_of_each_order_and_forgets():
    log = []
    asked = ASKED._replace(max_new_tokens=20)
    left_out = warm_up(tiny_model(), [Recorded("stock", log)], prompts_of(9, 30, 15, 20, 8), asked)
    assert log == [("stock", 30, 0, 20), ("stock", 15, 0, 8), ("stock", "forget")]
    assert left_out == {}


def test_who_can_not_take_part_is_left_out_with_the_reason():
    methods = [new_method("stock"), new_method("stock-static"), Recorded("b", [], (9,))]
    assert warm_up(tiny_model(), methods, prompts_of(9), ASKED) == {
        "stock-static": "transformers does not compile LlamaForCausalLM on cpu",
        "b": "RuntimeError: out of luck",
    }
    with pytest.raises(RuntimeError, match="out of"):
        warm_up(tiny_model(), [Recorded("stock", [], (9,))], prompts_of(9), ASKED)


def test_only_those_that_learn_catch_up():
    log = []
    stock, ours = Recorded("stock", log), SelfSpecMethod("selfspec", SelfSpec())
    prompts = prompts_of(9, 8)
    catch_up(tiny_model(), [stock, ours], prompts, ASKED)
    assert log == []
    assert ours.spec.total_stats.num_calls == 2
    fresh = SelfSpecMethod("selfspec", SelfSpec())
    list(measure(tiny_model(), [new_method("stock"), fresh], prompts, ASKED))
    assert fresh.spec.total_stats.num_steps == ours.spec.total_stats.num_steps


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 3], 1),
        ([1, 3], [1], 1),
        ([], [], None),
    ],
)
def test_the_first_difference(one, other, place):
    assert first_difference(one, other) == place


def test_random_prompts_are_the_same_however_many_there_are():
    tokenizer = make_tokenizer()
    few, many = (random_prompts(tokenizer, n, seed=3) for n in (2, 5))
    assert len(many) == 5
    assert all(torch.equal(a[1], b[1]) for a, b in zip(few, many, strict=False))
    ids = torch.cat([ids for _, ids in many])
    assert ids.shape == (5, 200)
    assert not set(ids.unique().tolist()) & set(tokenizer.all_special_ids)
    assert len(ids.unique()) > 250
    other = random_prompts(tokenizer, 1, seed=4)[0][1]
    assert not torch.equal(few[0][1], other)


def run(capsys, *options: str) -> tuple[int, list[str], str]:
    status = bench_step.main(["--threads", "1", "--max-new-tokens", "8", *options])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_the_whole_bench(questions, chat_folder, capsys):
    asked = ["--model", chat_folder, "--questions", str(questions), "--limit", "3"]
    methods = ["--methods", "stock", "prompt-lookup", "selfspec", "stock-static"]
    status, lines, _ = run(capsys, *asked, *methods, "--knob", "top_k=4")
    result = json.loads(lines[-1])
    assert status == 0
    assert result["num_prompts"] == result["num_same"] == 3
    assert result["knobs"] == ["top_k=4"]
    assert set(result["stage_ms"]) == set(STAGES)
    assert 0 < result["overhead"] < 1
    assert list(result["figures"]) == ["stock", "prompt-lookup", "selfspec"]
    assert list(result["figures"]["stock"]) == ["multi-turn", "qa", "overall"]
    assert result["figures"]["selfspec"]["overall"]["speed_up"] == result["speed_up"]
    assert "speed_up" not in result["figures"]["stock"]["overall"]
    assert result["left_out"]["stock-static"].startswith("transformers does not compile")
    assert result["differs"] == {"prompt-lookup": [], "selfspec": []}
    assert result["bound"]["16"]["speed_up"] >= 1
    assert sum(line.startswith(("multi-turn ", "qa ")) for line in lines) == 3
    assert any("left out: transformers does not compile" in line for line in lines)


def test_random_text_is_drawn_hot(chat_folder, capsys):
    options = ["--model", chat_folder, "--text", "random", "--limit", "2"]
    _, lines, _ = run(capsys, *options, "--methods", "stock", "selfspec")
    result = json.loads(lines[-1])
    assert result["temperature"] == 1.5
    assert result["num_prompts"] == result["num_same"] == 2
    assert list(result["figures"]["stock"]) == ["random", "overall"]


def test_a_killed_run_goes_on(questions, chat_folder, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    asked = ["--model", chat_folder, "--questions", str(questions), "--out", str(out)]
    asked += ["--methods", "stock", "selfspec", "--limit"]
    run(capsys, *asked, "2")
    whole = out.read_text()
    out.write_text(whole + '{"id": 100, "task": "qa", "num_prom')  # killed in the middle of a row
    _, lines, _ = run(capsys, *asked, "4")
    assert lines[0] == f"2 of 4 prompts are in {out} already"
    assert out.read_text().startswith(whole)
    assert len(out.read_text().splitlines()) == 5
    resumed = json.loads(lines[-1])
    out.unlink()
    _, lines, _ = run(capsys, *asked, "4")
    at_once = json.loads(lines[-1])
    for name in ("num_prompts", "num_same", "num_new_tokens", "tokens_per_step"):
        assert resumed[name] == at_once[name], "what was learned must be learned again"


def test_rows_of_other_settings_are_refused(questions, chat_folder, capsys, tmp_path):
    asked = ["--model", chat_folder, "--questions", str(questions), "--limit", "1"]
    asked += ["--methods", "stock", "selfspec", "--out", str(tmp_path / "rows.jsonl")]
    run(capsys, *asked)
    before = (tmp_path / "rows.jsonl").read_text()
    status, _, error = run(capsys, *asked, "--max-nodes", "4", "--seed", "1")
    assert status == 2
    assert "max_nodes 16 (now 4), seed 0 (now 1)" in error
    assert (tmp_path / "rows.jsonl").read_text() == before


def test_rows_of_other_prompts_are_refused(questions, chat_folder, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    asked = ["--model", chat_folder, "--questions", str(questions), "--limit", "1"]
    asked += ["--methods", "stock", "--out", str(out)]
    run(capsys, *asked)
    settings, row = out.read_text().splitlines()
    out.write_text(settings + "\n" + json.dumps({**json.loads(row), "id": 77}) + "\n")
    status, _, error = run(capsys, *asked)
    assert status == 2
    assert "must be of the same prompts" in error
    assert "(got (77, " in error


def test_a_cache_and_an_assistant_are_taken(questions, chat_folder, capsys, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    SelfSpec().save_pretrained(tmp_path / "known", tokenizer=tokenizer)
    asked = ["--model", chat_folder, "--questions", str(questions), "--limit", "1"]
    asked += ["--methods", "stock", "assisted", "selfspec", "--assistant", chat_folder]
    status, lines, _ = run(capsys, *asked, "--cache", str(tmp_path / "known"))
    result = json.loads(lines[-1])
    assert status == 0
    assert (result["cache"], result["assistant"]) == ("known", Path(chat_folder).name)
    assert result["figures"]["assisted"]["overall"]["num_same"] == 1


class Broken(StockMethod):
    """Fails on every prompt but the warm-up's."""

    num_asked = 0

    def answer(self, model, ids, **asked):
        self.num_asked += 1
        if self.num_asked > 1:
            raise RuntimeError("no more")
        return super().answer(model, ids, **asked)


def test_a_failure_is_told_by_the_exit_status(questions, chat_folder, capsys, monkeypatch):
    monkeypatch.setitem(METHODS, "broken", lambda _: Broken("broken"))
    asked = ["--model", chat_folder, "--questions", str(questions), "--limit", "1"]
    status, lines, _ = run(capsys, *asked, "--methods", "stock", "broken")
    assert status == 1
    assert "broken FAILED (RuntimeError: no more)" in lines[0]
    figures = json.loads(lines[-1])["figures"]["broken"]["overall"]
    assert figures["num_failed"] == 1
    assert "speed_up" not in figures


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--methods", "selfspec"], "--methods must include 'stock'"),
        (
            ["--methods", "stock", "selfspecs"],
            "unknown method 'selfspecs'; did you mean",
        ),
        (["--methods", "stock", "assisted"], "method 'assisted' needs an assistant model"),
        (["--knob", "max_node=3"], "unknown knob 'max_node'; did you mean 'max_nodes'?"),
        (["--task", "qa2"], "unknown task 'qa2'; did you mean 'qa'?"),
        (["--offset", "77", "--every", "80"], "must leave a question at least"),
    ],
)
def test_what_can_not_be_run_is_one_line(questions, chat_folder, capsys, options, told):
    asked = ["--model", chat_folder, "--questions", str(questions)]
    status, lines, error = run(capsys, *asked, *options)
    assert status == 2
    assert lines == []
    assert error.startswith("error: ")
    assert told in error
    assert error.count("\n") == 1


def test_questions_are_asked_for(chat_folder, capsys):
    status, _, error = run(capsys, "--model", chat_folder)
    assert status == 2
    assert "--questions must name Spec-Bench's question.jsonl" in error


def test_the_help_names_every_method(capsys):
    with pytest.raises(SystemExit):
        bench_step.main(["--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in METHODS)


def test_a_chain_model_has_no_curve(tmp_path: Path):
    """Neither trees nor their cost: the reason stands where the bound would."""
    options = bench_step.parse(["--model", "x"], None)
    prompts = [(Question(0, "qa", ()), prompt(length=9)["input_ids"])]
    assert "needs a model that can verify trees" in bench_step._costs(
        tiny_model("bloom"), prompts, options
    )
