"""Options that a command of eval can't take: one line, before any work."""

from __future__ import annotations

import importlib

import pytest

ASKED = "--model {model} --questions {questions}"
OUT = "--output {out} --max-new-tokens 8 "
STUDY = "study --bench random " + OUT
RUN = "run --bench spec-bench " + ASKED + " " + OUT
REFUSED = [
    ("ablation", "--out {out}", "--questions must name Spec-Bench's question.jsonl"),
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
    ("bench_step", ASKED + " --host-only --limit 1 --max-new-tokens 1", "a tree of 16 nodes (got"),
    ("bench_streamed", ASKED + " --methods magic", "magic"),
    ("bench_streamed", ASKED + " --methods streamed~draft~model", "--draft-model"),
    ("bench_streamed", ASKED + " --rounds 0", "--rounds"),
    ("bench_streamed", ASKED + " --knob a=1", "'a'"),
    ("command", RUN + "--methods stock,selfspecc", "'selfspecc'; did you mean 'selfspec'?"),
    ("command", RUN + "--methods assisted", "method 'assisted' must have --assistant-model"),
    ("command", RUN + "--methods stock,stock", "--methods must not repeat a name"),
    ("command", RUN + "--bench gsm9k", "unknown bench 'gsm9k'; did you mean 'gsm8k'?"),
    ("command", RUN + "--limit 0", "--limit must be >= 1 (got 0)"),
    ("command", RUN + "--every 3 --offset 3", "--offset must be 0 to --every - 1"),
    ("command", RUN + "--cache x --warm-up 2", "--warm-up must be 0 with --cache"),
    ("command", RUN + "--prompt-format chatt", "prompt format 'chatt'; did you mean 'chat'?"),
    ("command", RUN + "--model {plain} --prompt-format chat", "a model with a chat template"),
    ("command", RUN + "--knob max_nods=3", "unknown knob 'max_nods'; did you mean 'max_nodes'?"),
    ("command", RUN + "--model /no/where", "MODEL must be"),
    ("command", RUN + "--shape 1356m", "135m"),
    ("command", RUN + "--max-prompt-tokens 3", "must leave a question to measure (got none of 36)"),
    ("command", RUN + "--max-new-tokens 510", "must leave a question to measure (got none of 36)"),
    ("command", STUDY + "part", "unknown study 'part'; did you mean 'parts'?"),
    ("command", STUDY + "starts", "must have --caches CACHE … (got none)"),
    ("command", STUDY + "parts --caches a", "--caches must not be given to this study (got a)"),
    ("command", STUDY + "starts --caches a/x b/x", "a last name of their own (got two 'x')"),
    ("command", STUDY + "starts --caches a/stock", "a last name of their own (got two 'stock')"),
    ("command", STUDY + "fitted", "this study must have --cache CACHE"),
    ("command", "fit --out {out} --width 1 " + ASKED, "--width must be >= 2 (got 1)"),
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
    ("simulate", "{questions}", "line 1: must be a recorded text"),
    ("simulate", "{empty}", "must have a text at least"),
    ("simulate", "{questions} --record", "--record needs --model"),
    ("tokens_per_step", ASKED + " --rules", "--rules must come with --draft-model"),
    ("tokens_per_step", ASKED + " --remember x --max-nodes 4 8", "--remember must come with one"),
    ("train_tiny", "--out {out} --steps 0", "--steps must be >= 1 (got 0)"),
    ("train_tiny", "--out {out} --minutes 0", "--minutes must be > 0 (got 0.0)"),
    ("train_tiny", "--out {out} --steps 1 --seq-len 1", "--seq-len must be 2 to 2048 (got 1)"),
    ("train_tiny", "--out {out} --steps 1 --long-every -1", "--long-every must be >= 0 (got -1)"),
    ("tokens_per_step", "--model {model}", "--questions must name Spec-Bench's question.jsonl"),
]


@pytest.mark.parametrize(("command", "options", "said"), REFUSED)
def test_what_can_not_be_is_one_line(
    told, chat_folder, plain_folder, questions, tmp_path, command, options, said
):
    if command in ("bench_server", "load_server"):
        pytest.importorskip("fastapi", reason="needs the extra: pip install 'selfspec[serve]'")
        pytest.importorskip("openai", reason="needs the extra: pip install 'selfspec[test]'")
    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.touch()
    places = {"model": chat_folder, "plain": plain_folder, "questions": questions}
    words = options.format(**places, empty=empty, out=out).split()
    module = importlib.import_module(f"eval.{command}")
    status, lines, error = told(module, *(word.replace("~", " ") for word in words))
    *doing, line = error.splitlines()
    assert status == 2
    assert {*lines, *doing} <= {"loading the model"}
    assert line.startswith("error: ")
    assert said in line
    assert not out.exists()
