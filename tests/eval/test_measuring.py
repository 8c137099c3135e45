"""tokens_per_step and ablation, end to end on a tiny random model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eval import ablation, tokens_per_step
from eval.methods.switch import SwitchSource
from selfspec.records import TopK


def run(command, capsys, *options: str) -> dict:
    assert command.main(options) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_tokens_per_step(questions, chat_folder, capsys, temperature):
    options = ["--model", chat_folder, "--questions", str(questions), "--max-nodes", "1", "8"]
    options += ["--max-new-tokens", "12", "--temperature", temperature, "--limit", "3"]
    result = run(tokens_per_step, capsys, *options, "--knob", "depth_decay=0.9")
    assert result["num_prompts"] == 3
    assert result["rows"]["1"]["overall"] == [1.0, 1.0]  # plain decoding
    tokens, nodes = result["rows"]["8"]["overall"]
    assert tokens >= 1
    assert 1 < nodes <= 8


def test_rules_of_a_draft_model_that_is_the_model_itself(questions, chat_folder, capsys):
    options = ["--model", chat_folder, "--questions", str(questions), "--max-nodes", "3"]
    options += ["--max-new-tokens", "9", "--limit", "2", "--rules"]
    assert tokens_per_step.main(options) == 2
    assert "--rules must come with --draft-model" in capsys.readouterr().err
    found = run(tokens_per_step, capsys, *options, "--draft-model", chat_folder)["rules"]
    chain = found["chain, 3 nodes"]
    assert chain["num_first"] == chain["num_steps"] == 4
    assert {rule["num_tokens"] for rule in found.values()} == {16}


def test_widths_are_compared_at_full_width(questions, chat_folder):
    options = ["--model", chat_folder, "--questions", str(questions)]
    parsed = tokens_per_step._options(options)
    assert tokens_per_step.new_spec(parsed).config.budget == "fixed"
    assert tokens_per_step.new_spec(parsed, budget="measured").config.budget == "measured"


def test_a_later_run_starts_with_what_an_earlier_one_kept(questions, chat_folder, capsys, tmp_path):
    options = ["--model", chat_folder, "--questions", str(questions), "--max-nodes", "8"]
    options += ["--max-new-tokens", "12", "--limit", "2", "--remember", str(tmp_path / "kept")]
    cold, warm = (run(tokens_per_step, capsys, *options)["rows"]["8"]["overall"] for _ in range(2))
    assert warm[0] > cold[0]
    assert tokens_per_step.main([*options, "--max-nodes", "4", "8"]) == 2
    assert "--remember must come with one width" in capsys.readouterr().err


def test_ablation_measures_each_set_once(questions, chat_folder, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["--model", chat_folder, "--questions", str(questions), "--max-nodes", "4", "8"]
    options += ["--max-new-tokens", "12", "--limit", "2", "--out", str(out), "--sets"]
    assert ablation.main([*options, "all", "lut"]) == 0
    lines = out.read_text().splitlines()
    assert [(e["set"], e["max_nodes"]) for e in map(json.loads, lines)] == [
        ("all", 4),
        ("all", 8),
        ("lut", 4),
        ("lut", 8),
    ]
    capsys.readouterr()
    assert ablation.main([*options, "all", "no-lut", "switch"]) == 0
    assert out.read_text().splitlines()[:4] == lines
    assert len(out.read_text().splitlines()) == 8
    table = capsys.readouterr().out
    assert "| all | 4 |" in table
    assert "| switch | 8 |" in table


def test_the_switch_copies_a_long_match_and_else_asks_the_lut():
    span = [1, 2, 3, 4, 5, 6, 7]
    source = SwitchSource(20, 2)
    source.observe_pairs(
        np.array([[-1, 5]]), TopK(np.array([[9, 8]]), np.array([[0.5, 0.3]], np.float16))
    )
    long = source.open([*span, 0, *span[:5]], learns=True)
    assert [token for token, _ in long.expand(long.root())] == [6]
    assert long.expand(long.root())[0][1].source == "match"
    short = source.open([*span, 0, 5], learns=True)
    assert [token for token, _ in short.expand(short.root())] == [9, 8]
    assert [kind.rank for _, kind in short.expand(short.root())] == [1, 2]
