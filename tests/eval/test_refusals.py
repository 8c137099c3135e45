"""Options that a command of eval can't take: one line, before any work."""

from __future__ import annotations

import importlib

import pytest

ASKED = "--model {model} --questions {questions}"
REFUSED = [
    ("bench_batch", ASKED + " --methods stock fastest", "--methods must be of "),
    ("bench_batch", ASKED + " --methods arrival", "'stock' among them"),
    ("bench_batch", ASKED + " --rows 0", "--rows must be >= 1 (got 0)"),
    ("bench_server", ASKED + " --max-new-tokens 0", "--max-new-tokens must be >= 1 (got 0)"),
    ("bench_server", ASKED + " --clients 0", "--clients must be >= 1 (got 0)"),
    ("bench_server", ASKED + " --limit 1 --clients 1 2", "--clients must name at most 1 rounds"),
    ("bench_server", ASKED + " --budget endless", "budget"),
    ("bench_server", ASKED + " --task cooking", "cooking"),
    ("bench_step", ASKED + " --methods selfspec", "--methods must include 'stock'"),
    ("bench_step", ASKED + " --methods stock selfspecs", "unknown method 'selfspecs'; did you"),
    ("bench_step", ASKED + " --methods stock assisted", "must have --assistant-model (got none)"),
    ("bench_step", ASKED + " --knob max_node=3", "'max_node'; did you mean 'max_nodes'?"),
    ("bench_step", ASKED + " --task qa2", "unknown task 'qa2'; did you mean 'qa'?"),
    ("bench_step", ASKED + " --offset 77 --every 80", "must leave a question to measure"),
    ("bench_step", "--model {model}", "pass --questions PATH"),
    ("bench_streamed", ASKED + " --methods magic", "magic"),
    ("bench_streamed", ASKED + " --methods streamed~draft~model", "--draft-model"),
    ("bench_streamed", ASKED + " --rounds 0", "--rounds"),
    ("bench_streamed", ASKED + " --knob a=1", "'a'"),
    ("edge_network", "--draws 0", "--draws must be"),
    ("edge_network", "--out no/where.html", "--out must be"),
    ("first_call", "--model {model} --rounds 0", "--rounds must be >= 1 (got 0)"),
    ("first_call", "--model {model} --rounds 1 --knob max_nodes=0", "max_nodes must be >= 1 (got"),
    ("hetero", "--width 0", "--width must be >= 1 (got 0)"),
    ("hetero", "--columns 8 0", "--columns must be >= 1 (got 0)"),
    ("hetero", "--out no/where.json", "--out must be a file"),
    ("hetero", "--model any --units cuda", "--units must be cpu"),
    ("kv_memory", "--model {model} --knob depth=3", "unknown knob 'depth'"),
    ("load_server", "--clients 0", "--clients must be >= 1"),
    ("predict", "--classes 0", "--classes must be >= 1 (got 0)"),
    ("same_text", "--model {model}", "--questions must name"),
    ("tokens_per_step", "--model {model}", "--questions must name Spec-Bench's question.jsonl"),
]


@pytest.mark.parametrize(("command", "options", "said"), REFUSED)
def test_what_can_not_be_is_one_line(told, chat_folder, questions, command, options, said):
    if command in ("bench_server", "load_server"):
        pytest.importorskip("fastapi", reason="needs the extra: pip install 'selfspec[serve]'")
        pytest.importorskip("openai", reason="needs the extra: pip install 'selfspec[test]'")
    words = options.format(model=chat_folder, questions=questions).split()
    module = importlib.import_module(f"eval.{command}")
    status, lines, error = told(module, *(word.replace("~", " ") for word in words))
    assert status == 2
    assert set(lines) <= {"loading the model"}
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
