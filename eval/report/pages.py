"""The report of a run: `summary.json`, `report.md` and a page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.methods.names import DESCRIPTIONS
from eval.methods.studies import STUDIES
from eval.report.pictures import Picture, pictures
from eval.report.rows import Record
from eval.report.statistics import OVERALL
from eval.report.steps import curve_table, stages_table
from eval.report.summary import summary, trust
from eval.report.table import Table
from eval.report.tables import methods_table, steps_table, tasks_table, verdict, winners
from selfspec.machine.user_files import replace_bytes

Summary = Mapping[str, Any]


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)


def write_report(folder: Path, record: Record) -> str:
    """Writes the three files; returns the Markdown."""
    figures = summary(record)
    text = markdown(figures)
    replace_bytes(folder / "summary.json", f"{json.dumps(figures, indent=1)}\n".encode())
    replace_bytes(folder / "report.md", text.encode())
    page = report_page(figures, pictures(figures, record))
    replace_bytes(folder / "report.html", page.encode())
    return text


def write_pictures(folder: Path, drawn: Iterable[Picture]) -> list[Path]:
    """Writes each picture as an SVG file; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in drawn:
        path = folder / f"{picture.title.lower().replace(',', '').replace(' ', '-')}.svg"
        replace_bytes(path, picture.svg.encode())
        written.append(path)
    return written


def page(
    title: str,
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    *,
    lead: str = "",
    lists: Mapping[str, Sequence[str]] | None = None,
    about: Mapping[str, str] | None = None,
) -> str:
    """HTML that needs nothing but itself."""
    shown = {"title": title, "tables": tables, "pictures": pictures, "lead": lead}
    template = _TEMPLATES.get_template("page.html.jinja")
    return template.render(**shown, lists=lists or {}, about=about or {})


def markdown(figures: Summary) -> str:
    """What the run was, its tables, and where others were better."""
    about = "\n".join(f"- {name}: {value}" for name, value in _about(figures).items())
    tables = [table.markdown() for table in _tables(figures)]
    lists = [
        "\n".join([f"## {title}", "", *(f"- {line}" for line in lines)])
        for title, lines in _lists(figures).items()
        if lines
    ]
    return "\n\n".join([f"# {_title(figures)}", verdict(figures), about, *tables, *lists]) + "\n"


def report_page(figures: Summary, drawn: Sequence[Picture]) -> str:
    """The same with pictures, as HTML."""
    return page(
        _title(figures),
        _tables(figures),
        drawn,
        lead=verdict(figures),
        lists=_lists(figures),
        about=_about(figures),
    )


def _title(figures: Summary) -> str:
    settings = figures["settings"]
    shape = f" grown to {settings['shape']}" if settings["shape"] else ""
    return f"{settings['model']}{shape} on {settings['bench']}, {settings['state']}"


def _about(figures: Summary) -> dict[str, str]:
    """What a figure depends on, in words."""
    settings, where = figures["settings"], figures["environment"]
    sampled = "greedy" if settings["temperature"] == 0 else f"T = {settings['temperature']}"
    knobs = ", ".join(f"{name} = {value}" for name, value in settings["knobs"].items())
    commit = (where["git_commit"] or "no clone")[:10] + ", changed" * where["git_dirty"]
    study = STUDIES.get(settings["study"])
    return {
        **({"study": f"{study.title} (after {study.after})"} if study else {}),
        "decoding": f"{sampled}, {settings['max_new_tokens']} new tokens at most, "
        f"seed {settings['seed']}",
        "state": f"{settings['state']} at the first question; what is learned is kept",
        "knobs": knobs or "defaults",
        "machine": f"{where['machine']}, {settings['dtype']}, {where['attention']}, "
        f"{where['threads']} threads",
        "versions": f"selfspec {where['selfspec']} ({commit}), torch {where['torch']}, "
        f"transformers {where['transformers']}, Python {where['python']}",
        "times": trust(figures),
        "questions": "; ".join([*figures["notes"], f"{_num_answers(figures)} answers of each"]),
    }


def _num_answers(figures: Summary) -> int:
    """Fewer than asked for where the run was stopped."""
    overall = next(iter(figures["methods"].values()))[OVERALL]
    return int(overall["num_answers"] + overall["num_failed"])


def _tables(figures: Summary) -> list[Table]:
    tables = [
        methods_table(figures),
        tasks_table(figures, "Speed-up by task", "speed_up"),
        tasks_table(figures, "Tokens per step by task (nodes)", "tokens_per_step"),
        steps_table(figures),
        stages_table(figures),
        curve_table(figures),
    ]
    return [table for table in tables if table is not None]


def _lists(figures: Summary) -> dict[str, list[str]]:
    """What is said in lines below the tables, by the title of its section."""
    failures = [
        f"{name}, {count} answers: {error}"
        for name, counts in figures["errors"].items()
        for error, count in counts.items()
        if name not in figures["left_out"]
    ]
    return {
        "Where another method does better": winners(figures),
        "Left out": [f"{name}: {why}" for name, why in figures["left_out"].items()],
        "What failed": failures,
        "The methods": _methods(figures["settings"]),
    }


def _methods(settings: Mapping[str, Any]) -> list[str]:
    """What each one is; of a study's variants, which method with which knobs."""
    lines = []
    for name in settings["methods"]:
        variant = settings["variants"].get(name, {"method": name, "knobs": {}})
        knobs = "".join(f", {knob} = {value}" for knob, value in variant["knobs"].items())
        cache = f", cache {variant['cache']}" if variant.get("cache") else ""
        line = DESCRIPTIONS.get(variant["method"], variant["method"])
        lines.append(f"{name}: {line}{knobs}{cache}")
    return lines
