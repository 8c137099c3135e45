"""Commands of eval are listed, none imports another, and help needs nothing that is heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import eval as evaluation
from eval.command import COMMANDS as ALL
from tests.test_imports import imports_of, name_of, part_of

ROOT = Path(str(evaluation.__file__)).parent

COMMANDS = {path.stem for path in ROOT.glob("[!_]*.py")} - {"errors", "options"}
FILES = sorted(ROOT.rglob("*.py"))


def parts_imported(path: Path) -> set[str]:
    """Every part or module on top that a file names, inside functions too."""
    return {part_of(name) for name in imports_of(path) if name.startswith("eval.")}


def test_every_command_is_listed_and_none_imports_another():
    assert {name for name in ALL if isinstance(ALL[name], str)} | {"command"} == COMMANDS
    imported = {part_of(name_of(path)): parts_imported(path) & COMMANDS for path in FILES}
    pairs = {(name, other) for name, others in imported.items() for other in others - {name}}
    assert pairs == {("__main__", "command")}


def test_help_is_there_at_once():
    """What is heavy is imported where a command needs it."""
    heavy = "{'torch', 'transformers', 'pandas', 'matplotlib', 'jinja2'}"
    look = (
        "import sys; from eval.command import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ALL:
        assert f"\n    {name}" in done.stdout, name
