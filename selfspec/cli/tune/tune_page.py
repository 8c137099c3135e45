"""The report of `selfspec tune`: a page with trees, and with maps of what came true.

The pictures are SVG, written by hand, so that a page needs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from selfspec.cli.shared.text_files import write_text
from selfspec.draft.fitted import FittedTree
from selfspec.fitting import AcceptanceCounts, Fit

_WIDTHS = (8, 16, 32, 64)
_DEEPEST, _LAST_RANK = 12, 12  # What a map shows.
_CELL, _GAP, _ROW = 46, 16, 44  # In pixels: a cell of a map, the leaves of a tree, its levels.
_STYLE = (
    ":root{color-scheme:light dark}svg{fill:currentColor}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}"
    "svg{max-width:100%;height:auto;display:block;font:11px system-ui,sans-serif}"
    "table{border-collapse:collapse}td,th{padding:.2rem .6rem;text-align:right}"
)


def write_report(
    path: Path,
    grown: AcceptanceCounts,
    shaped: AcceptanceCounts,
    fits: Sequence[Fit],
    chosen: Fit,
) -> None:
    """Writes the page."""
    parts = ["<h1>A tree fitted to a model</h1>", _table(fits, chosen)]
    for fit in fits:
        if fit is chosen or fit.tree.width in _WIDTHS:
            kept = ", the one that was kept" if fit is chosen else ""
            parts.append(f"<h2>{fit.tree.width} nodes{kept}</h2>")
            parts.append(picture_of_tree(fit.tree))
    maps = {"with one shape": shaped, "where each tree grows anew": grown}
    for title, counts in maps.items():
        parts.append(f"<h2>How often a candidate came true {title}</h2>")
        parts.append(heatmap(counts))
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>A fitted tree</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )
    write_text(path, "--report", page)


def picture_of_tree(tree: FittedTree) -> str:
    """The tree from left to right by rank; the likelier a node, the darker, with its chance."""
    xs, depths = _positions(tree)
    chances = (1.0, *tree.chances)
    marks = [
        f'<line x1="{xs[parent]:.0f}" y1="{_y(depths[parent])}" x2="{xs[node]:.0f}" '
        f'y2="{_y(depths[node])}" stroke="#b8c0cc"/>'
        for node, parent in enumerate(tree.parents, start=1)
    ]
    for x, depth, chance, rank in zip(xs, depths, chances, (0, *tree.ranks), strict=True):
        tip = f"candidate {rank + 1}, accepted in {chance:.1%} of all steps" if depth else "root"
        marks.append(
            f'<circle cx="{x:.0f}" cy="{_y(depth)}" r="7" fill="{_colour(chance)}" '
            f'stroke="#5b6b82"><title>{tip}</title></circle>'
        )
    return _svg(max(xs) + 20, _y(max(depths)) + 20, f"a tree of {tree.width} nodes", marks)


def heatmap(counts: AcceptanceCounts) -> str:
    """A row for each depth, a column for each rank, and how often that candidate came true."""
    marks = [
        f'<text x="{_x(rank) + _CELL / 2}" y="28" text-anchor="middle">{rank + 1}</text>'
        for rank in range(_LAST_RANK)
    ]
    marks.append('<text x="4" y="12">candidate, by the order of its siblings</text>')
    depth = 0
    for depth, (trials, rates) in enumerate(_levels(counts), start=1):
        y = 8 + 26 * depth
        marks.append(f'<text x="4" y="{y + 17}">depth {depth}, n = {trials}</text>')
        for rank, rate in enumerate(rates[:_LAST_RANK]):
            ink = "#fff" if rate > 0.45 else "#222"
            marks.append(
                f'<rect x="{_x(rank)}" y="{y}" width="{_CELL}" height="26" '
                f'fill="{_colour(rate)}"/><text x="{_x(rank) + _CELL / 2}" y="{y + 17}" '
                f'text-anchor="middle" fill="{ink}">{100 * rate:.1f}</text>'
            )
    return _svg(_x(_LAST_RANK) + 10, 44 + 26 * depth, "acceptance in % by depth and rank", marks)


def _levels(counts: AcceptanceCounts) -> Iterator[tuple[int, list[float]]]:
    """The trials of each level that has some, and the rate of each rank."""
    ranks = range(1 + max((path[-1] for path in counts.hits), default=0))
    for depth in range(_DEEPEST):
        trials = sum(number for path, number in counts.trials.items() if len(path) == depth)
        if not trials:
            return
        hits = dict.fromkeys(ranks, 0)
        for path, number in counts.hits.items():
            hits[path[-1]] += number if len(path) == depth + 1 else 0
        yield trials, [hit / trials for hit in hits.values()]


def _positions(tree: FittedTree) -> tuple[list[float], list[int]]:
    """Where each node stands across, its parent above the middle of it; and each node's depth."""
    children: list[list[int]] = [[] for _ in range(tree.width)]
    depths = [0]
    for node, parent in enumerate(tree.parents, start=1):
        children[parent].append(node)
        depths.append(depths[parent] + 1)
    xs = [0.0] * tree.width
    right = 20.0

    def place(node: int) -> None:
        nonlocal right
        below = sorted(children[node], key=lambda child: tree.ranks[child - 1])
        for child in below:
            place(child)
        if below:
            xs[node] = (xs[below[0]] + xs[below[-1]]) / 2
        else:
            xs[node], right = right, right + _GAP

    place(0)
    return xs, depths


def _table(fits: Sequence[Fit], chosen: Fit) -> str:
    head = "<tr><th>width<th>tokens a step<th>ms<th>tokens a second</tr>"
    rows = (
        f"<tr><td>{fit.tree.width}{' (kept)' if fit is chosen else ''}"
        f"<td>{fit.tree.expected:.2f}<td>{1000 * fit.seconds:.1f}<td>{fit.rate:.1f}</tr>"
        for fit in fits
        if fit is chosen or fit.tree.width in (2, 4, *_WIDTHS)
    )
    return f"<table>{head}{''.join(rows)}</table>"


def _svg(width: float, height: float, label: str, marks: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{escape(label)}">{"".join(marks)}</svg>'
    )


def _colour(share: float) -> str:
    """From nearly white to dark blue; small shares can still be told apart."""
    return f"hsl(215 70% {96 - 64 * share**0.5:.0f}%)"


def _x(rank: int) -> int:
    return 150 + _CELL * rank


def _y(depth: int) -> int:
    return 20 + _ROW * depth
