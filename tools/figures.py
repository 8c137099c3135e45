"""The first page's table and picture, from runs of `eval`: `python -m tools.figures NAME=FOLDER …`.

A FOLDER is the output of `python -m eval run --measuring-set` with the methods that the table has.
Prints the rows of the table, and writes the picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from eval.methods.names import STOCK
from eval.report.pictures import drawn
from eval.report.statistics import OVERALL

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "first-page.svg"
# What the picture calls the methods of a run, and their colours.
_METHODS = {
    "prompt-lookup": ("transformers' prompt lookup", "#b6bec9"),
    "forward-only": ("selfspec without drafts", "#8cb4e8"),
    "selfspec": ("selfspec", "#1f6feb"),
}


def main(arguments: list[str]) -> None:
    runs = dict(argument.split("=", 1) for argument in arguments)
    parts = {name: _overall(Path(folder)) for name, folder in runs.items()}
    print(
        "| model | whole call | faster forwards | drafts | prompt lookup |\n|---|---|---|---|---|"
    )
    for name, part in parts.items():
        whole, forwards, lookup = (
            f"{part[method]['speed_up']['total']:.2f}x"
            for method in ("selfspec", "forward-only", "prompt-lookup")
        )
        drafts = f"{part['selfspec']['drafting_speed_up']['total']:.2f}x"
        print(f"| {name} | **{whole}** | {forwards} | {drafts} | {lookup} |")
    PICTURE.write_text(_picture(parts), encoding="utf-8")


def _overall(folder: Path) -> dict[str, Any]:
    """By method, the figures of all questions."""
    methods = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["methods"]
    return {name: tasks[OVERALL] for name, tasks in methods.items() if name != STOCK}


def _picture(parts: dict[str, dict[str, Any]]) -> str:
    bars = pd.DataFrame(
        {
            title: [part[method]["speed_up"]["total"] for part in parts.values()]
            for method, (title, _) in _METHODS.items()
        },
        index=list(parts),
    )

    def draw(on: Any) -> None:
        colours = [colour for _, colour in _METHODS.values()]
        bars[::-1].plot.barh(ax=on, color=colours, width=0.75, legend=False)
        on.axvline(1, color="#57606a", lw=1)
        for group in on.containers:
            on.bar_label(group, fmt="%.2fx", padding=3, fontsize=8)
        on.grid(visible=False, axis="y")

    title = "Whole calls, prompt included, over plain generate()"
    return drawn(title, draw, x="times as fast", y="", height=3.2).svg


if __name__ == "__main__":
    main(sys.argv[1:])
