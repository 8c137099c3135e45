"""The report of `selfspec tune`: a page with pictures of trees, and maps of what came true.

The pictures are SVG, written by hand, so that a page needs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from selfspec.draft.fitted import FittedTree
from selfspec.fitting import AcceptanceCounts, Fit

_WIDTHS = (8, 16, 32, 64)
_DEEPEST, _LAST_RANK = 12, 12  # What a map shows.
_GAP, _ROW = 16, 44  # In pixels: the leaves of a tree, and its levels.
_STYLE = (
    ":root{color-scheme:light dark}svg{fill:currentColor;max-width:100%;height:auto;display:block}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}"
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
    parts = ["<h1>A tree fitted to a model</h1>", _fits_table(fits, chosen)]
    for fit in fits:
        if fit is chosen or fit.tree.width in _WIDTHS:
            kept = ", the one that was kept" if fit is chosen else ""
            parts += [f"<h2>{fit.tree.width} nodes{kept}</h2>", picture_of_tree(fit.tree)]
    maps = {"with one shape": shaped, "where each tree grows anew": grown}
    for title, counts in maps.items():
        parts += [f"<h2>How often a candidate came true {title}, in %</h2>", map_of(counts)]
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>A fitted tree</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</html>\n"
    )
    path.write_text(page, encoding="utf-8")


def picture_of_tree(tree: FittedTree) -> str:
    """The tree from left to right by rank; the likelier a node, the darker, with its chance."""
    xs, depths = _positions(tree)
    ys = [20 + _ROW * depth for depth in depths]
    marks = [
        f'<line x1="{xs[parent]:.0f}" y1="{ys[parent]}" x2="{xs[node]:.0f}" y2="{ys[node]}" '
        f'stroke="#b8c0cc"/>'
        for node, parent in enumerate(tree.parents, start=1)
    ]
    tips = ["root"] + [
        f"candidate {rank + 1}, accepted in {chance:.1%} of all steps"
        for rank, chance in zip(tree.ranks, tree.chances, strict=True)
    ]
    for x, y, chance, tip in zip(xs, ys, (1.0, *tree.chances), tips, strict=True):
        marks.append(
            f'<circle cx="{x:.0f}" cy="{y}" r="7" fill="{_colour(chance)}" stroke="#5b6b82">'
            f"<title>{tip}</title></circle>"
        )
    width, height = max(xs) + 20, max(ys) + 20
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    label = f'role="img" aria-label="a tree of {tree.width} nodes"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>{"".join(marks)}</svg>'


def map_of(counts: AcceptanceCounts) -> str:
    """A row for each depth, a column for each rank, and how often that candidate came true."""
    rows = [
        [f"<th>depth {depth}, n = {trials}", *map(_cell, rates[:_LAST_RANK])]
        for depth, (trials, rates) in enumerate(_levels(counts), start=1)
    ]
    return _table(["<th>candidate", *(f"<th>{rank + 1}" for rank in range(_LAST_RANK))], *rows)


def _cell(rate: float) -> str:
    ink = "#fff" if rate > 0.45 else "#222"
    return f'<td style="background:{_colour(rate)};color:{ink}">{100 * rate:.1f}'


def _levels(counts: AcceptanceCounts) -> Iterator[tuple[int, list[float]]]:
    """The trials of each level that has some, and the rate of each rank."""
    trials, hits = counts.by_depth()
    num_ranks = 1 + max((rank for _, rank in hits), default=0)
    for depth in range(_DEEPEST):
        if not trials[depth]:
            return
        yield trials[depth], [hits[depth, rank] / trials[depth] for rank in range(num_ranks)]


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


def _fits_table(fits: Sequence[Fit], chosen: Fit) -> str:
    rows = (
        f"<td>{fit.tree.width}{' (kept)' if fit is chosen else ''}"
        f"<td>{fit.tree.expected:.2f}<td>{1000 * fit.seconds:.1f}<td>{fit.rate:.1f}"
        for fit in fits
        if fit is chosen or fit.tree.width in (2, 4, *_WIDTHS)
    )
    return _table("<th>width<th>tokens a step<th>ms<th>tokens a second", *rows)


def _table(*rows: Iterable[str]) -> str:
    lines = (f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table>{''.join(lines)}</table>"


def _colour(share: float) -> str:
    """From nearly white to dark blue; small shares can still be told apart."""
    return f"hsl(215 70% {96 - 64 * share**0.5:.0f}%)"
