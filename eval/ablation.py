"""What each source is worth: alone, left out, all together, and against the switch rule.

    python -m eval.ablation --model PATH --questions question.jsonl --out rows.jsonl

Each line of the file is one set of sources at one width, measured as `eval.tokens_per_step`
does. Sets: `all`; a source's name, that one alone; `no-NAME`, all but that one; `branches`, all
with Self-Draft's 6 x 6 branches beside them; `switch`, longest match else LUT tree. A line that
the file has already is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.methods.switch import SwitchSource
from eval.options import command
from eval.report.table import Table
from eval.runs.environment import short_name, told
from eval.tokens_per_step import add_options, load, measure, new_spec, rounded
from selfspec.config import SOURCE_NAMES


def _run(options: argparse.Namespace) -> int:
    """Measures every set at every width and prints a table, and its last column as JSON."""
    model, prompts = load(options)
    done, asked = _read(options.out), told("ablation", options, num_prompts=len(prompts))
    wanted = [
        _key(options, name, n) for name, n in itertools.product(options.sets, options.max_nodes)
    ]
    for key in wanted:
        if key in done:
            continue
        spec = new_spec(options, max_nodes=key[1], **_knobs(key[0], model.config.vocab_size))
        figures = rounded(measure(model, prompts, options, spec))
        done[key] = {**asked, "set": key[0], "max_nodes": key[1], "rows": figures}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[key]) + "\n")
        print(f"{key[0]:>10} {key[1]:>3}: {figures['overall'][0]:.2f}", flush=True)
    lines = [done[key] for key in wanted]
    print(table(lines))
    overall = {f"{line['set']} {line['max_nodes']}": line["rows"]["overall"] for line in lines}
    print(json.dumps({**asked, "rows": overall}))
    return 0


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each set and width, a column for each task."""
    tasks = list(lines[0]["rows"])
    rows = []
    for line in lines:
        cells = (f"{line['rows'][t][0]:.2f} ({line['rows'][t][1]:.0f})" for t in tasks)
        rows.append([line["set"], str(line["max_nodes"]), *cells])
    return Table("Tokens per step (queries)", ["sources", "nodes", *tasks], rows).markdown()


def _knobs(name: str, vocab_size: int) -> dict[str, Any]:
    if name == "switch":
        return {"sources": (), "extra_sources": [SwitchSource(vocab_size, 8)], "max_depth": 64}
    if name == "all":
        return {}
    if name == "branches":
        return {"num_branches": 6}
    if name.startswith("no-"):
        return {"sources": tuple(source for source in SOURCE_NAMES if f"no-{source}" != name)}
    return {"sources": (name,)}


def _key(options: argparse.Namespace, name: str, max_nodes: int) -> tuple[Any, ...]:
    prompts = options.offset, options.every, options.task
    return name, max_nodes, options.temperature, short_name(options.cache), *prompts


def _read(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    entries = map(json.loads, lines)
    names = ("set", "max_nodes", "temperature", "cache", "offset", "every", "task")
    return {tuple(entry[name] for name in names): entry for entry in entries}


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    alone = [*SOURCE_NAMES, *(f"no-{name}" for name in SOURCE_NAMES)]
    parser.add_argument("--sets", nargs="+", default=["all", *alone, "branches", "switch"])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended to")


main = command("ablation", __doc__, _add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
