"""The evaluation's rooms import one another one way only: the table below says which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import eval as evaluation

ROOT = Path(str(evaluation.__file__)).parent

# What each room, or module on top, may import of `eval`. Commands stand above all of them.
ALLOWED = {
    "errors": set(),
    "models": {"errors"},
    "benches": {"errors", "models"},
    "methods": {"errors"},
    "report": {"errors", "methods"},
    "options": {"methods"},
    "edge": {"errors"},
    "units": {"errors", "models", "report"},
    "runs": {"benches", "errors", "methods", "models", "options", "report"},
}
COMMANDS = {
    "__init__",
    "__main__",
    "ablation",
    "bench_batch",
    "bench_server",
    "bench_step",
    "bench_streamed",
    "command",
    "edge_network",
    "first_call",
    "grow",
    "hetero",
    "kv_memory",
    "load_server",
    "predict",
    "same_text",
    "tokens_per_step",
    "train_tiny",
}
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def room_of(path: Path) -> str:
    return name_of(path).split("/")[0]


def rooms_imported(path: Path) -> set[str]:
    """Every room or module on top that a file names, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {part_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            names = [alias.name for alias in node.names] if node.module == "eval" else [""]
            found |= {part_of(f"{node.module}.{name}") for name in names}
    return found - {""}


def part_of(module: str) -> str:
    """``eval.report.rows`` belongs to ``report``; what is not ours belongs nowhere."""
    package, _, rest = module.partition(".")
    return rest.split(".")[0] if package == "eval" else ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_imports_only_what_the_table_allows(path):
    room = room_of(path)
    if room not in COMMANDS:
        assert rooms_imported(path) - {room} <= ALLOWED[room]


def test_the_table_has_no_circle_and_every_room():
    assert {room_of(path) for path in FILES} == set(ALLOWED) | COMMANDS
    seen: set[str] = set()
    for room, allowed in ALLOWED.items():
        assert allowed <= seen, f"{room} must stand below what it imports"
        seen.add(room)


def test_commands_are_few_and_import_one_another_only_to_share_measuring():
    assert len(COMMANDS - {"__init__", "__main__"}) <= 16
    imported = {room_of(path): rooms_imported(path) & COMMANDS for path in FILES}
    pairs = {(name, other) for name, others in imported.items() for other in others}
    assert pairs == {("__main__", "command"), ("ablation", "tokens_per_step")}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_its_job(path):
    text = path.read_text(encoding="utf-8")
    assert path.name == "__init__.py" or ast.get_docstring(ast.parse(text))
