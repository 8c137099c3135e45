"""A page that needs nothing but itself, in the style that drawings and tables expect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

_LIGHT = {
    "ink": "#1f2328",
    "soft": "#656d76",
    "paper": "#ffffff",
    "grid": "#e7eaee",
    "strong": "#f6f8fa",
}
_DARK = {
    "ink": "#e6edf3",
    "soft": "#9198a1",
    "paper": "#0d1117",
    "grid": "#262c36",
    "strong": "#161b22",
}
_LAYOUT = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1240px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
p.verdict { font-size: 1.05rem; max-width: 46rem } p.note { max-width: 54rem }
p.note, dl { color: var(--soft); font-size: .87rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dd { margin: 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .87rem }
th, td { padding: .25rem .5rem; text-align: right }
th { white-space: nowrap }
tbody th, thead th:first-child { text-align: left }
thead th { color: var(--soft); font-weight: 500 }
tbody tr:nth-child(odd) { background: var(--strong) }
svg { width: 100%; max-width: 860px; height: auto; display: block }
"""
_MARKS = """
svg { font: 12px system-ui, sans-serif; background: var(--paper) }
svg text { fill: var(--ink) } svg text.tick, svg text.title { fill: var(--soft) }
svg text.name { paint-order: stroke; stroke: var(--paper); stroke-width: 3px }
svg polyline { fill: none } .grid { stroke: var(--grid) } .base { stroke: var(--soft) }
.whisker { stroke: var(--ink); stroke-width: 1.3 } .curve { stroke-width: 2 }
"""


def _variables(colors: Mapping[str, str]) -> str:
    values = "".join(f"--{name}: {color}; " for name, color in colors.items())
    return f":root {{ {values}}}"


_STYLE = (
    f"{_variables(_LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_variables(_DARK)} }}"
    f"{_LAYOUT}{_MARKS}"
)
# The marks of a picture in a file of its own; not every program that shows SVG knows variables.
_PICTURE_STYLE = re.sub(r"var\(--(\w+)\)", lambda name: _LIGHT[name[1]], _MARKS)


def svg_file(svg: str) -> str:
    """A drawing as a file of its own, with a style in plain colours."""
    head, _, marks = svg.removeprefix("<svg").partition(">")
    start = f'<svg xmlns="http://www.w3.org/2000/svg"{head}><style>{_PICTURE_STYLE}</style>'
    return f"{start}{marks}\n"


def document(title: str, body: str) -> str:
    """A whole page around a body of HTML."""
    name = escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{name}</h1>{body}</body></html>\n"
    )
