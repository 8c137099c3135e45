"""What forwards cost by their width, as a picture of text."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.cli.check.curve_plot import curve_plot
from selfspec.cost import WIDTHS, CostCurve

COSTS = (1.0, 1.02, 1.08, 1.2, 1.33, 1.5, 1.7, 1.9, 2.5, 3.0)
CURVE = CostCurve({width: 0.0212 * cost for width, cost in zip(WIDTHS, COSTS, strict=True)})

PLOT = """\
  3 |                                                 ▁▂▂▂▃▄▄▄▅▆▆▆▇██
2.5 |                                   ▁▁▂▃▃▄▄▅▆▆▇▇█████████████████
  2 |                 ▁▁▂▂▂▃▃▄▄▄▅▅▆▆▆▇███████████████████████████████
1.5 |  ▁▁▂▂▃▃▄▄▅▅▆▇▇█████████████████████████████████████████████████
  1 |████████████████████████████████████████████████████████████████
0.5 |████████████████████████████████████████████████████████████████
  0 +----------------------------------------------------------------
     1  4   8   12  16      24      32              48              64"""


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
