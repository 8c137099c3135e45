"""Options that a command of eval can't take: one line, exit status 2, before any work."""

from __future__ import annotations

import pytest

ASKED = "--model {model} --questions {questions}"
OUT = "--output {out} --max-new-tokens 8 "
STUDY = "--bench random " + OUT
RUN = "--bench spec-bench " + ASKED + " " + OUT
REFUSED = [
    ("bench_batch", ASKED + " --methods arrival", "'stock' among them"),
    ("bench_server", ASKED + " --limit 1 --clients 1 2", "--clients must name at most 1 rounds"),
    ("bench_server", "--model {plain} --questions {questions}", "must have a chat template"),
    ("bench_kept", "--model {plain} --questions {questions}", "must have a chat template"),
    ("run", "--model {model}", "--bench must name a bench"),
    ("bench_streamed", ASKED + " --methods streamed~draft~model", "--draft-model"),
    ("run", RUN + "--bench random", "takes no --questions"),
    ("run", RUN + "--methods stock,selfspecc", "'selfspecc'; did you mean 'selfspec'?"),
    ("run", RUN + "--methods assisted", "method 'assisted' must have --assistant-model"),
    ("run", RUN + "--methods stock,rest", "method 'rest' must have --datastore"),
    ("run", RUN + "--bench gsm9k", "unknown bench 'gsm9k'; did you mean 'gsm8k'?"),
    ("run", RUN + "--limit 0", "--limit must be >= 1 (got 0)"),
    ("run", RUN + "--knob max_nods=3", "unknown knob 'max_nods'; did you mean 'max_nodes'?"),
    ("run", RUN + "--model /no/where", "MODEL must be"),
    ("run", RUN + "--max-new-tokens 510", "must leave a question to measure (got none of 36)"),
    ("study", "part " + STUDY, "unknown study 'part'; did you mean 'parts'?"),
    ("study", "starts " + STUDY + "--caches a/x b/x", "a last name of their own (got two 'x')"),
    ("study", "fitted " + STUDY, "must have --tree FILE"),
    ("fit", "--out {out} --width 1 " + ASKED, "--width must be >= 2 (got 1)"),
    ("edge_network", "--draws 0", "--draws must be >= 1 (got 0)"),
    ("hetero", "--width 0", "--width must be >= 1 (got 0)"),
    ("predict", "--tokens 0", "--tokens"),
    ("predict", "--random x", "unknown shape 'x'"),
    ("replay", "{questions}", "must be the rows of a run"),
    ("tokens_per_step", ASKED + " --remember x --max-nodes 4 8", "--remember must come with one"),
]


@pytest.mark.parametrize(("command", "options", "said"), REFUSED)
def test_what_can_not_be_is_one_line(
    told, plain_folder, chat_folder, questions, tmp_path, command, options, said
):
    if command in ("bench_server", "bench_kept"):
        pytest.importorskip("fastapi", reason="needs the extra: pip install '.[serve]'")
        pytest.importorskip("openai", reason="needs the extra: pip install '.[test]'")
    out = tmp_path / "out"
    models = {"model": chat_folder, "plain": plain_folder}
    words = options.format(questions=questions, out=out, **models).split()
    status, lines, error = told(command, *(word.replace("~", " ") for word in words))
    *doing, line = error.splitlines()
    assert status == 2
    assert {*lines, *doing} <= {"loading the model"}
    assert line.startswith("error: ")
    assert said in line
    assert not out.exists()
