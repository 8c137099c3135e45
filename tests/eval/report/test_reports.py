"""Reports of synthetic rows: tables, pictures, and two runs side by side."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval.command import main
from eval.errors import EvalError
from eval.report.charts import Bar, Point, grouped_bars, line_chart, points_chart, stacked_bars
from eval.report.compare import compared, differences
from eval.report.pages import markdown, page
from eval.report.pictures import _bins, method_colors, pictures
from eval.report.rows import ROWS, Answer, Numbers, Record, RowFile
from eval.report.steps import curve_table, stages_table
from eval.report.summary import brief, summary, trust
from eval.report.svg import Scale, ticks
from eval.report.table import Table
from eval.report.tables import steps_table
from eval.runs import progress
from eval.runs.asked import Asked
from selfspec.cost import CostCurve

METHODS = ("stock", "selfspec", "other")
ASKED = {"max_new_tokens": 8, "temperature": 0.3, "shape": "135m", "knobs": {"top_k": 4}}
SETTINGS = {
    **Asked(model="m", bench="b", output=Path(), methods=METHODS, **ASKED).settings(),
    "dtype": "float32",
    "questions_sha256": "aa",
}
ENVIRONMENT = {
    "selfspec": "1",
    "torch": "2",
    "transformers": "5",
    "python": "3",
    "machine": "a | b",
    "attention": "sdpa",
    "threads": 2,
    "git_commit": None,
    "git_dirty": False,
}


def numbers(seconds: float, **more) -> Numbers:
    about = {"num_prompt_tokens": 4, "num_new_tokens": 9, "prefill_seconds": 0.1, "num_steps": 8}
    return Numbers(seconds=seconds, **{**about, "output_sha256": "x", **more})


def ours(seconds: float, **more) -> Numbers:
    counts = {
        "num_steps": 4,
        "num_nodes": 40,
        "num_branch_queries": 0,
        "accepted_lengths": {0: 1, 2: 2, 40: 1},
        "widths": {1: 1, 13: 3},
        "drafted_by_source": {"lut": 9},
        "accepted_by_source": {"lut": 4, "<odd>": 1},
        "stage_seconds": {"prefill": 0.1, "forward": seconds / 2, "new stage": 0.01},
        "same": "identical",
    }
    return numbers(seconds, **{**counts, **more})


def record(selfspec: float = 1.0, **settings) -> Record:
    """Two questions of different tasks; `other` fails on the second."""
    about = {"environment": ENVIRONMENT, "notes": ["2 questions of b"], "num_shards": 1}
    curve = {"widths": [1, 2, 64], "seconds": [0.01, 0.01, 0.03], "num_columns": 90}
    made = Record(runs=[{"settings": {**SETTINGS, **settings}, **about}], curve=curve)
    for question, task in ((1, "qa"), (2, "<math>")):
        given = {
            "stock": numbers(2.0),
            "selfspec": ours(selfspec * question, same=("identical", "near-tie")[question - 1]),
            "other": ours(1.5) if question == 1 else None,
        }
        for order, (method, counted) in enumerate(given.items()):
            error = None if counted else "broken <here>"
            about = {"run": "r", "turn": 0, "order": order, "task": task, "method": method}
            answer = Answer(**about, questions=(question,), error=error, numbers=counted)
            made.answers[answer.key] = answer
    return made


def test_the_summary_has_every_figure_and_its_brief_only_a_few():
    found = summary(record())
    assert list(found["methods"]) == ["stock", "selfspec", "other"]
    assert list(found["methods"]["selfspec"]) == ["qa", "<math>", "overall"]
    overall = found["methods"]["selfspec"]["overall"]
    assert overall["speed_up"]["total"] == pytest.approx(4 / 3, rel=1e-4)
    assert (overall["num_same"], overall["num_near_ties"]) == (1, 1)
    assert found["errors"] == {"other": {"broken <here>": 1}}
    assert brief(found)["selfspec"] == {
        "tokens_per_step": overall["tokens_per_step"],
        "speed_up": overall["speed_up"]["total"],
        "num_failed": overall["num_failed"],
    }


def test_the_markdown_says_what_was_measured_where_others_win_and_what_failed():
    text = markdown(summary(record(selfspec=1.2)))
    assert text.startswith("# m grown to 135m on b, cold\n")
    assert "- decoding: T = 0.3, 8 new tokens at most" in text
    assert "- knobs: top_k = 4" in text
    assert "; 2 answers of each\n" in text
    assert "| selfspec | 1.11x |" in text
    assert "\n\nselfspec ran at 1.11x the speed of stock generate() (" in text
    assert "1 of 2 + 1 near-ties |" in text
    assert "- other, 1 answers: broken <here>" in text
    assert "## Where another method does better" in text
    assert "- overall, speed-up: other 1.33x, selfspec 1.11x" in text
    assert "- <math>, speed-up: stock" not in text


def test_a_run_that_was_stopped_says_so():
    made = record()
    assert "stopped" not in markdown(summary(made))
    made.runs[0]["num_asked"] = 5
    assert "The run was stopped when 2 of 5 questions were answered. self" in markdown(
        summary(made)
    )
    made.runs[0]["num_asked"] = 2
    assert "stopped" not in markdown(summary(made))


def test_no_two_stages_have_one_colour():
    made = record()
    for answer in made.answers.values():
        if answer.numbers is not None:
            names = ("prepare", "prefill", "draft", "layout", "forward", "verify", "learn", "new")
            answer.numbers.stage_seconds.update(dict.fromkeys(names, 0.1))
    picture = next(p for p in pictures(summary(made), made) if p.title == "Where the time goes")
    legend = re.findall(r'height="10.0" style="fill:(.*?)"', picture.svg)
    assert len(set(legend)) == len(legend) >= 8


def test_who_is_left_out_has_no_row_but_a_reason():
    made = record()
    made.runs[0]["left_out"] = {"other": "no GPU <here>"}
    figures = summary(made)
    text, html = markdown(figures), page(figures, made)
    assert "| other |" not in text
    assert "## Left out\n\n- other: no GPU <here>" in text
    assert "What failed" not in text
    assert "<li>other: no GPU &lt;here&gt;</li>" in html
    assert not [row for row in steps_table(figures).rows if row[1] == "other"]


def test_the_table_by_task_has_a_row_for_each_task_and_method():
    made = record()
    made.runs[0]["left_out"] = {"absent": "no GPU"}
    lines = steps_table(summary(made)).markdown().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + 3 * 3
    assert len({row.count("|") for row in rows}) == 1
    assert rows[3] == (
        "| qa | selfspec | 1 | 9 | 111 | 2.00x | 2.00x | 2.00 to 2.00 | – | 2.00x | 2.00x | "
        "1.00x | 2.11x | – | 112 | 2.00 (10) | – | – | 1 of 1 |"
    )
    assert rows[7].startswith("| <math> | other | 0 (1 failed) | 0 | – | – |")
    assert "absent is left out: no GPU." in lines[-1]


def test_the_stages_of_a_step_have_shares():
    made = record()
    table = stages_table(summary(made))
    assert table is not None
    rows = {row[0]: row[1] for row in table.rows}
    assert table.head == ["stage", "selfspec", "other"]  # stock does not say
    assert rows["forward"] == "187.500 (98.7%)"
    assert rows["new stage"] == "2.500 (1.3%)"
    assert rows["all but the forward"] == "1.3%"
    assert rows["nodes"] == "10.0"
    assert rows["prefill, a call"] == "100.000"
    for answer in made.answers.values():
        if answer.numbers is not None:
            answer.numbers.stage_seconds.clear()
    assert stages_table(summary(made)) is None


def test_the_curve_and_its_bound():
    told = curve_table(CostCurve({1: 0.01, 8: 0.02, 64: 0.08}), 100, 8).markdown()
    assert "A forward behind 100 tokens" in told
    assert "| plain steps | 1.00 | 2.00 | 8.00 |" in told
    assert "4.00x at width 8 within 8 nodes, 8.00x at width 64 within 64 nodes" in told


def lines_of(**errors: str) -> list[dict]:
    """One question; stock's 9 tokens take 2 seconds, ours 1."""
    given = {"stock": numbers(2.0), "ours": ours(1.0, same="different", differs_at=3)}
    lines = []
    for order, method in enumerate(given):
        about = {"run": "r", "turn": 0, "order": order, "task": "qa", "questions": (7,)}
        error = errors.get(method)
        counted = None if error else given[method]
        lines.append(Answer(**about, method=method, error=error, numbers=counted).as_line())
    return lines


def test_a_line_for_each_question():
    names = ["stock", "ours"]
    assert progress.answer_line(lines_of(), names) == (
        "qa 7, 9 tokens: stock 222.22 ms, ours 111.11 ms 2.00x (different at token 3)"
    )
    assert progress.answer_line(lines_of(ours="broken"), names) == (
        "qa 7, 9 tokens: stock 222.22 ms, ours FAILED (broken)"
    )
    assert progress.answer_line(lines_of(stock="no"), names).startswith(
        "qa 7, 9 tokens: stock FAILED (no), ours 111.11 ms"
    )


def test_a_cell_never_breaks_its_table():
    lines = Table("t", ["a"], [["x | y"]]).markdown().splitlines()
    assert lines[-1] == "| x \\| y |"
    assert "<th>&lt;x&gt;</th>" in Table("t", ["a"], [["<x>"]]).html()


def test_a_silence_is_broken_but_not_more_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    file = StringIO()  # no terminal
    shown = progress.RunProgress(file)
    for now[0] in (5.0, 11.0, 15.0, 22.0):
        shown.meanwhile(f"at {now[0]:.0f}")
    shown.say("done")
    now[0] = 31.0
    shown.meanwhile("too soon")
    assert file.getvalue().splitlines() == ["at 11", "at 22", "done"]


def test_a_busy_machine_is_told_in_plain_words():
    assert "--rounds 3 shows how far" in trust({"stock_variation": None})
    assert trust({"stock_variation": 0.04}).endswith("vary by 4% from round to round.")
    assert "vary by 35% from round to round: the machine was busy" in trust(
        {"stock_variation": 0.35}
    )


def test_the_page_is_whole_and_has_every_picture():
    made = record()
    text = page(summary(made), made)
    drawings = [part.split("</svg>")[0] for part in text.split("<svg")[1:]]
    assert len(drawings) == 7
    for drawing in drawings:
        ElementTree.fromstring(f"<svg{drawing}</svg>")  # well-formed, whatever the names
    assert "<math>" not in text
    assert "http" not in text


def test_a_method_has_one_colour_in_all_pictures():
    made = record()
    own = {picture.title: picture.svg for picture in pictures(summary(made), made)}
    color = method_colors(list(summary(made)["methods"]))["other"]
    titles = ["Speed-up over stock by task", "Drafts accepted in a step"]
    titles += ["Tokens per step against the width of a step", "Where accepted tokens came from"]
    assert all(color in own[title] for title in titles)


def test_where_there_is_nothing_to_draw_there_is_no_picture():
    made = record()
    for key in [key for key in made.answers if key.method != "stock"]:
        del made.answers[key]
    made.runs[0]["settings"]["methods"] = ["stock"]
    made.curve = None
    assert [each.title for each in pictures(summary(made), made)] == ["Where the time goes"]


def heights(drawing: str, color: str) -> list[float]:
    """Of the bars of a colour, as far as they have tips: the legend has none."""
    root = ElementTree.fromstring(drawing)
    return [
        float(mark.get("height", 0))
        for mark in root.iter("rect")
        if mark.get("style") == f"fill:{color}" and len(mark)
    ]


def test_bars_are_as_high_as_their_values_say():
    groups = {"a": {"x": Bar(2.0, 1.5, 2.5)}, "b": {"x": Bar(3.0)}, "c": {"x": Bar(0.5)}}
    drawing = grouped_bars(groups, {"x": "#111"}, label="l", unit="x", base=1.0)
    one, two, below = heights(drawing, "#111")
    assert two == pytest.approx(2 * one, abs=0.2)
    assert below == pytest.approx(one / 2, abs=0.2)


def test_stacked_bars_lie_end_to_end():
    drawing = stacked_bars(
        {"m": {"a": 1.0, "b": 3.0}}, {"a": "#111", "b": "#222"}, label="l", x_title="ms"
    )
    bars = [mark for mark in ElementTree.fromstring(drawing).iter("rect") if len(mark)]
    first, second = ({k: float(bar.get(k, 0)) for k in ("x", "width")} for bar in bars)
    assert second["x"] == pytest.approx(first["x"] + first["width"], abs=0.2)
    assert second["width"] == pytest.approx(3 * first["width"], abs=0.2)


def test_lines_and_points_stay_on_the_canvas():
    line = line_chart({"a": {0: 5.0, 12: 0.0}}, {"a": "#111"}, label="l", unit="", x_title="x")
    points = [Point(x, 2.0, f"name {x}", "overall", True) for x in (1, 2, 80)]
    colors = {point.series: "#111" for point in points}
    drawn = points_chart(points, colors, label="l", x_title="x", y_title="y")
    for drawing in (line, drawn):
        root = ElementTree.fromstring(drawing)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for mark in root.iter("circle"):
            assert 0 <= float(mark.get("cx", -1)) <= width
            assert 0 <= float(mark.get("cy", -1)) <= height
    names = [
        mark for mark in ElementTree.fromstring(drawn).iter("text") if mark.get("class") == "name"
    ]
    places = {(mark.get("x"), mark.get("y")) for mark in names}
    assert len(places) == len(points)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.013), (0.4, 3.7), (0, 96), (5, 5)])
def test_ticks_are_few_and_inside(low, high):
    found = ticks(low, high)
    assert 0 < len(found) <= 8
    assert all(low - 1e-9 <= value <= high + 1e-9 or low == high for value in found)


def test_scales_and_bins():
    assert Scale(0, 10, 100, 0)(5) == 50
    assert Scale(3, 3, 0, 1)(3) == 0
    assert _bins(1) == [(1, 1)]
    assert _bins(9) == [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16)]
    assert method_colors(["selfspec"])["selfspec"] != method_colors(["stock"])["stock"]
    assert len(set(method_colors(["new", "newer", "stock"]).values())) == 3


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
    with pytest.raises(EvalError, match="must have the same bench"):
        compared(a, record(questions_sha256="bb"))
    b.answers.clear()
    with pytest.raises(EvalError, match="must share a question"):
        compared(a, b)


def test_the_commands_read_folders(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "must be the --output of a run" in capsys.readouterr().err
    made = record()
    made.runs[0] |= {"kind": "run", "schema": 1}
    made.curve = {"kind": "curve", **(made.curve or {})}
    RowFile(tmp_path / ROWS).append(made.lines())
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 0
    assert "asked and measured alike" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--pictures", str(tmp_path / "pictures")]) == 0
    assert (tmp_path / "report.html").exists()
    drawn = list((tmp_path / "pictures").iterdir())
    assert tmp_path / "pictures" / "speed-up-over-stock-by-task.svg" in drawn
    for path in drawn:  # Each stands alone: it is well-formed and brings its colours.
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "fill: #1f2328" in (root[0].text or "")


@pytest.mark.parametrize("command", [[], ["run"], ["compare"], ["report"], ["simulate"], ["study"]])
def test_help_names_what_there_is(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    if command == ["run"]:
        from eval.benches.registry import BENCHES
        from eval.methods.names import DESCRIPTIONS
        from eval.methods.registry import METHODS

        assert set(DESCRIPTIONS) == set(METHODS)
        for name in (*METHODS, *BENCHES, "code-stdlib", "--cache", "--warm-up"):
            assert name in text, name
    if command == ["study"]:
        from eval.methods.studies import STUDIES

        assert all(study.title in text for study in STUDIES.values())
