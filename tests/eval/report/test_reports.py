"""Reports of synthetic rows: figures, tables, pictures, and two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from eval.command import main
from eval.errors import EvalError
from eval.report.compare import compared, differences
from eval.report.pages import markdown
from eval.report.pictures import pictures
from eval.report.rows import ROWS, Line, Record, append
from eval.report.steps import curve_table
from eval.report.summary import summary
from eval.report.tables import steps_table
from eval.runs.asked import Asked

METHODS = ("stock", "selfspec", "other")
ASKED = {"max_new_tokens": 8, "temperature": 0.3, "shape": "135m", "knobs": {"top_k": 4}}
SETTINGS = {
    **Asked(model="m", bench="b", output=Path(), methods=METHODS, **ASKED).settings(),
    "dtype": "float32",
    "questions_sha256": "aa",
}
NAMES = ("selfspec", "torch", "transformers", "python", "attention")
ENVIRONMENT = dict.fromkeys(NAMES, "1") | {
    "machine": "a | b",
    "threads": 2,
    "git_commit": None,
    "git_dirty": False,
}


def numbers(seconds: float, **more: Any) -> Line:
    about = {"num_prompt_tokens": 4, "num_new_tokens": 9, "prefill_seconds": 0.1, "num_steps": 8}
    return {"seconds": seconds, **about, "output_sha256": "x", **more}


def ours(seconds: float, **more: Any) -> Line:
    counts = {
        "num_steps": 4,
        "num_nodes": 40,
        "accepted_lengths": {0: 1, 2: 2, 40: 1},
        "widths": {1: 1, 13: 3},
        "drafted_by_source": {"lut": 9},
        "accepted_by_source": {"lut": 4, "<odd>": 1},
        "stage_seconds": {"prefill": 0.1, "forward": seconds / 2, "new stage": 0.01},
        "same": "identical",
    }
    return numbers(seconds, **{**counts, **more})


def answer(question: int, method: str, task: str, **what: Any) -> Line:
    about = {"run": "r", "turn": 0, "order": 0, "task": task, "method": method, **what}
    return {"kind": "answer", "questions": [question], **about}


def all_lines(selfspec: float = 1.0, **settings: Any) -> list[Line]:
    """Two questions of different tasks; `other` fails on the second."""
    about = {"environment": ENVIRONMENT, "notes": ["2 questions of b"], "schema": 1}
    curve = {"widths": [1, 2, 64], "seconds": [0.01, 0.01, 0.03], "num_columns": 90}
    lines = [{"kind": "run", "settings": {**SETTINGS, **settings}, **about}]
    for question, task in ((1, "qa"), (2, "<math>")):
        same = ("identical", "near-tie")[question - 1]
        other = {"numbers": ours(1.5)} if question == 1 else {"error": "broken <here>"}
        lines += [
            answer(question, "stock", task, numbers=numbers(2.0)),
            answer(question, "selfspec", task, numbers=ours(selfspec * question, same=same)),
            answer(question, "other", task, **other),
        ]
    return [*lines, {"kind": "curve", **curve}]


def record(selfspec: float = 1.0, **settings: Any) -> Record:
    made = Record()
    for line in all_lines(selfspec, **settings):
        made.take(line)
    return made


def test_the_markdown_says_what_was_measured_where_others_win_and_what_failed():
    text = markdown(summary(record(selfspec=1.2)))
    assert text.startswith("# m grown to 135m on b, cold\n")
    for part in (
        "- decoding: T = 0.3, 8 new tokens at most",
        "- knobs: top_k = 4",
        "; 2 answers of each\n",
        "| selfspec | 1.11x |",
        "\n\nselfspec ran at 1.11x the speed of stock generate() (",
        "1 of 2 + 1 near-ties |",
        "- other, 1 answers: broken <here>",
        "- overall, speed-up: other 1.33x, selfspec 1.11x",
    ):
        assert part in text
    assert "- <math>, speed-up: stock" not in text


def test_the_table_by_task_has_a_row_for_each_task_and_method():
    lines = steps_table(summary(record())).markdown().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 3 * 3
    assert len({row.count("|") for row in rows}) == 1
    cells = [cell.strip() for cell in rows[3].split("|")]
    assert cells[1:8] == ["qa", "selfspec", "1", "9", "111", "2.00x", "2.00x"]
    assert cells[-2] == "1 of 1"
    assert rows[7].startswith("| <math> | other | 0 (1 failed) | 0 | – | – |")


def test_the_curve_and_its_bound():
    made = record(knobs={"max_nodes": 8})
    made.curve = {"widths": [1, 8, 64], "seconds": [0.01, 0.02, 0.08], "num_columns": 100}
    told = curve_table(summary(made)).markdown()
    assert "| plain steps | 1.00 | 2.00 | 8.00 |" in told
    assert "4.00x at width 8 within 8 nodes, 8.00x at width 64 within 64 nodes" in told


def test_every_picture_has_a_title_and_names_its_axes():
    made = record()
    drawn = pictures(summary(made), made)
    for picture in drawn:
        # Letters are drawn as shapes; what they say stands in comments, which a parser drops.
        assert ElementTree.fromstring(picture.svg).tag.endswith("svg")
        assert f"<!-- {picture.title} -->" in picture.svg
    said = "".join(picture.svg for picture in drawn)
    for name in ("speed-up over stock (times)", "milliseconds per new token", "time (plain steps)"):
        assert f"<!-- {name} -->" in said
    for key in [key for key in made.answers if key.method != "stock"]:
        del made.answers[key]
    made.runs[0]["settings"]["methods"] = ["stock"]
    made.curve = None
    assert [each.title for each in pictures(summary(made), made)] == ["Where the time goes"]


def test_two_runs_are_compared_question_by_question():
    a, b = record(selfspec=1.0), record(selfspec=0.5, max_new_tokens=16)
    text = compared(a, b)
    assert "- max_new_tokens: 8 / 16" in text
    assert "| stock | overall | 2 | 1.00 / 1.00 | – / – | 1.00x | 1.00 to 1.00 | 2 of 2 |" in text
    assert "| selfspec | overall | 2 | 2.00 / 2.00 | 1.33x / 2.67x | 2.00x |" in text
    assert "| other | <math> | 0 |" in text
    assert differences(a, a) == []


def test_only_what_both_have_is_compared():
    a, b = record(), record()
    del b.answers[next(key for key in b.answers if key.questions == (2,) and key.method == "stock")]
    assert "| stock | <math> | 0 |" in compared(a, b)
    with pytest.raises(EvalError, match="the same bench"):
        compared(a, record(questions_sha256="bb"))
    b.answers.clear()
    with pytest.raises(EvalError, match="share a question"):
        compared(a, b)


def test_the_commands_read_folders(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "must be the --output of a run" in capsys.readouterr().err
    append(tmp_path / ROWS, all_lines())
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 0
    assert "asked and measured alike" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--pictures", str(tmp_path / "pictures")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("</svg>") == len(list((tmp_path / "pictures").glob("*.svg"))) == 6
    assert "<math>" not in page.replace("<!-- <math> -->", "")
