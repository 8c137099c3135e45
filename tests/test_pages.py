"""The pages name only what exists: files, links, commands, options, knobs, Python names."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import selfspec
from eval.command import COMMANDS, MODULES
from selfspec import GenerationStats, SpecConfig, config
from selfspec.cli.app import app
from selfspec.cli.shared.options import knob_texts
from tests.test_imports import ALLOWED

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name for name in ("caches/README.md", "eval/README.md")),
    *DOCS,
]
# These two tell of what is gone, so the names in them need not exist.
HISTORIES = {"CHANGELOG.md", "log.md"}
TODAY = [page for page in PAGES if page.name not in HISTORIES]

FOLDERS = "selfspec|tests|eval|docs|examples|caches"
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.*\n)+)")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?<![\w/.~-])(?:{FOLDERS})/[\w./-]*")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


over_pages = pytest.mark.parametrize("page", PAGES, ids=page_name)
over_pages_of_today = pytest.mark.parametrize("page", TODAY, ids=page_name)
over_pages_of_docs = pytest.mark.parametrize(
    "page", [page for page in TODAY if page.name != "CONTRIBUTING.md"], ids=page_name
)


def code_in(page: Path) -> list[str]:
    """Everything that a page sets as code: blocks and words in a line."""
    text = page.read_text(encoding="utf-8")
    without_fences = FENCED.sub("", text)
    return [*FENCED.findall(text), *INDENTED.findall(text), *INLINE.findall(without_fences)]


def commands_in(page: Path, start: str) -> Iterator[list[str]]:
    """The words of each command line that begins with `start`."""
    for code in code_in(page):
        for line in code.replace("\\\n", " ").splitlines():
            for command in line.split("#")[0].split("&&"):
                if re.match(rf"{start}(\s|\.|$)", command.strip()):
                    yield shlex.split(command)


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 140
    assert sum(line.startswith("|--") for line in lines) <= 3


@pytest.mark.parametrize(
    "command",
    [
        "pip install . && selfspec demo",
        "pip install -e '.[test]' && python -m pytest -n auto --dist worksteal",
    ],
)
def test_the_readme_has_the_two_commands(command: str) -> None:
    assert f"    {command}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


@over_pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors_of(path), f"{target}: {path.name} has no such heading"


@over_pages_of_today
def test_files_exist(page: Path) -> None:
    for code in code_in(page):
        for name in PATH.findall(code):
            assert (ROOT / name.rstrip(".")).exists(), f"{name} is not in the repository"


def test_every_page_of_docs_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = set(LINK.findall(index.read_text(encoding="utf-8")))
    assert {page.name for page in DOCS} - {"index.md"} <= linked


@over_pages_of_today
def test_commands_of_selfspec_exist(page: Path) -> None:
    for words in commands_in(page, "selfspec"):
        if words[0] != "selfspec":  # Such as selfspec.attach(model, spec)
            continue
        command = app
        for word in words[1:]:
            if word not in commands_below(command):
                break
            command = command[word]
        named = " ".join(words)
        missing = command.default_command is None and len(words) > 1 and words[1][0] != "-"
        assert not missing, f"{named}: no such command"
        assert options_in(words) <= options_of_selfspec(command) | {"--help"}, (
            f"{named}: no such option"
        )


@over_pages_of_today
def test_commands_of_eval_exist(page: Path) -> None:
    for words in commands_in(page, "python -m eval"):
        named = " ".join(words)
        assert words[2] == "eval", f"{named}: no such module"
        assert {*words[3:4]} <= {*COMMANDS, *MODULES, "--help"}, f"{named}: no such command"
        assert options_in(words) <= options_of_eval(), f"{named}: no such option"


@over_pages_of_docs
def test_options_named_alone_exist(page: Path) -> None:
    """As in "`--restart` begins anew"."""
    for code in code_in(page):
        if code.startswith("--"):
            known = options_of_selfspec(app) | options_of_eval()
            assert options_in(code.split()) <= known, code


def commands_below(command: App) -> list[str]:
    return [name for name in command if not name.startswith("-")]


def options_of_selfspec(command: App) -> set[str]:
    """The options of a command and of all commands below it."""
    found = {"--help", "--version"}
    if command.default_command is not None:
        arguments = command.assemble_argument_collection()
        found |= {name for argument in arguments for name in argument.names}
    return found.union(*(options_of_selfspec(command[name]) for name in commands_below(command)))


def options_in(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {"-m"}


@cache
def options_of_eval() -> set[str]:
    """Every option that some command of eval defines."""
    found = set()
    for path in (ROOT / "eval").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {text for text in found if re.fullmatch(r"--[a-z-]+", text)} | {"--help"}


@over_pages_of_today
def test_python_names_exist(page: Path) -> None:
    for code in code_in(page):
        for name in re.findall(r"(?<![\w./-])selfspec\.([A-Za-z]\w*)", code):
            known = hasattr(selfspec, name) or find_spec(f"selfspec.{name}") is not None
            assert known, f"selfspec.{name}"
        for name in re.findall(r"\bstats\.(\w+)", code):
            assert hasattr(GenerationStats(), name), f"stats.{name}"


@over_pages_of_today
def test_knobs_that_are_set_exist(page: Path) -> None:
    """In `SelfSpec(...)` and alone, as in `budget="fixed"`."""
    names = {field.name for field in fields(SpecConfig)}
    for code in code_in(page):
        for call in re.findall(r"(?:SelfSpec|SpecConfig)\(([^()]*)\)", code):
            SpecConfig.of(**literals(call))
        if re.fullmatch(r"\w+=[^\s`]+", code) and code.partition("=")[0] in names:
            SpecConfig.of(**literals(code))


def literals(arguments: str) -> dict[str, Any]:
    """The knobs of a call by name, without the other arguments of `SelfSpec`."""
    others = inspect.signature(selfspec.SelfSpec).parameters
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    words = (word for word in call.keywords if word.arg not in others)
    return {str(word.arg): ast.literal_eval(word.value) for word in words}


def test_the_table_of_knobs_is_made_from_their_texts() -> None:
    """Run this file's `table_of_knobs` to make it anew."""
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert table_of_knobs() in text


def table_of_knobs() -> str:
    rows = []
    for field in fields(SpecConfig):
        default = ", ".join(field.default) if field.name == "sources" else f"{field.default}"
        rows.append(f"| `{field.name}` | {default} | {knob_texts()[field.name]} |")
    return "\n".join(["| knob | default | what it does |", "|---|---|---|", *rows, ""])


@pytest.mark.parametrize("values", ["BUDGETS", "FORWARDS", "LEARNING_SCOPES", "SOURCE_NAMES"])
def test_the_page_of_knobs_has_every_value(values: str) -> None:
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    for value in getattr(config, values):
        assert f'"{value}"' in text, value


def test_the_design_says_what_each_room_may_import() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (`\w+`(?:, `\w+`)*) \|$", text, re.MULTILINE)
    written = {room: set(re.findall(r"\w+", names)) for room, names in rows}
    rooms = "cache compat cost draft engines machine papers run verify"
    assert set(rooms.split()) == set(written)
    assert written == {room: (ALLOWED[room] or set()) - {room} for room in written}
