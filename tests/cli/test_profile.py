"""A curve as a table, a plot and a file."""

import io
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from selfspec.cli.errors import CliError
from selfspec.cli.profile import curve_plot, curve_table, print_curve, write_curve
from selfspec.cost import WIDTHS, CostCurve

COSTS = (1.0, 1.02, 1.08, 1.2, 1.33, 1.5, 1.7, 1.9, 2.5, 3.0)
CURVE = CostCurve({width: 0.0212 * cost for width, cost in zip(WIDTHS, COSTS, strict=True)})
ABOUT = {"model": "llama, 135M", "device": "a card [bold]", "batch": 1}

PLOT = """\
  3 |                                                 ▁▂▂▂▃▄▄▄▅▆▆▆▇██
2.5 |                                   ▁▁▂▃▃▄▄▅▆▆▇▇█████████████████
  2 |                 ▁▁▂▂▂▃▃▄▄▄▅▅▆▆▆▇███████████████████████████████
1.5 |  ▁▁▂▂▃▃▄▄▅▅▆▇▇█████████████████████████████████████████████████
  1 |████████████████████████████████████████████████████████████████
0.5 |████████████████████████████████████████████████████████████████
  0 +----------------------------------------------------------------
     1  4   8   12  16      24      32              48              64"""


def printed(*objects) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(*objects)
    return console.file.getvalue()


def test_the_table_has_a_line_for_each_measured_width():
    lines = [line.split() for line in printed(curve_table(CURVE)).splitlines() if line.strip()]
    assert lines[0] == ["width", "ms", "plain", "steps", "ms", "a", "node"]
    assert lines[2] == ["1", "21.2", "1.00", "21.2"]
    assert lines[5] == ["8", "25.4", "1.20", "3.18"]
    assert [int(line[0]) for line in lines[2:]] == list(WIDTHS)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1e-6, "0.00100"), (0.0123, "12.3"), (1.0404, "1040"), (60, "60000")]
)
def test_times_have_three_digits_that_count(seconds, shown):
    assert printed(curve_table(CostCurve({1: seconds}))).split()[-3] == shown


def test_the_plot_is_to_scale():
    assert curve_plot(CURVE) == PLOT


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 300), st.floats(1e-6, 1e3), min_size=1, max_size=10))
def test_a_plot_has_a_size_whatever_the_curve(points):
    curve = CostCurve(points)
    *lines, axis, labels = curve_plot(curve).splitlines()
    assert 1 <= len(lines) <= 8
    assert all(len(line) <= len(axis) for line in lines)
    shown = [int(label) for label in labels.split()]
    assert shown == sorted(shown)
    assert set(shown) <= set(curve.widths)
    assert shown[0] == curve.widths[0]
    assert "█" in lines[-1]
    assert re.search("[▁▂▃▄▅▆▇█]", lines[0])


def test_all_of_it_says_where_it_was_measured():
    console = Console(file=io.StringIO(), width=40)
    print_curve(CURVE, {**ABOUT, "note": "bell\a"}, console)
    text = console.file.getvalue()
    assert "device: a card [bold]\n" in text
    assert "note: bell\n" in text
    assert PLOT in text


def test_the_file_holds_the_curve_and_where_it_was_measured(tmp_path):
    write_curve(tmp_path / "curve.json", CURVE, ABOUT)
    values = json.loads((tmp_path / "curve.json").read_text())
    assert values["about"] == ABOUT
    assert values["widths"] == list(WIDTHS)
    assert values["seconds"] == pytest.approx([0.0212 * cost for cost in COSTS])
    assert values["plain_steps"] == pytest.approx(COSTS)


def test_a_file_that_can_not_be_written_is_said_in_one_line(tmp_path):
    with pytest.raises(CliError, match="--output must be writable"):
        write_curve(tmp_path, CURVE, ABOUT)


class TestCommand:
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))

    def test_shows_writes_and_keeps_the_curve(self, run, chat_folder, tmp_path):
        out = tmp_path / "curve.json"
        result = run(
            "profile", "--model", chat_folder, "--device", "cpu", "--context", "30", "--output", out
        )
        assert result.exit_code == 0
        assert "plain steps" in result.output
        assert "context: 30 tokens (the costs are used for 0 to 255 tokens)\n" in result.output
        written = json.loads(out.read_text())
        assert written["widths"][:2] == [1, 2]
        assert written["about"]["rows"] == 1
        assert written["about"]["context"].startswith("30 tokens ")
        assert len(list((tmp_path / "caches").rglob("*.json"))) == 1

    def test_a_context_that_does_not_fit(self, fails, chat_folder):
        line = fails("profile", "--model", chat_folder, "--device", "cpu", "--context", "999999")
        assert "--context must be <" in line

    def test_a_forward_as_asked_or_none(self, run, fails, chat_folder):
        asked = ("profile", "--model", chat_folder, "--device", "cpu", "--context", "9")
        assert "forward: eager" in run(*asked, "--forward", "eager").output
        assert "unknown forward 'egaer'; did you mean 'eager'?" in fails(
            *asked, "--forward", "egaer"
        )
        assert "forward='graph' can't be had: a CPU captures no graphs" in fails(
            *asked, "--forward", "graph"
        )
