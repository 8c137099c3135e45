"""The pages name only what exists: files, links, commands, options, knobs, Python names."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import selfspec
from eval.command import COMMANDS, main
from selfspec import GenerationStats, SpecConfig, config
from selfspec.cli.app import app
from selfspec.cli.options import knob_texts
from tests.test_imports import ALLOWED
from tools import reference

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(ROOT / folder / "README.md" for folder in ("caches", "eval")),
    *DOCS,
]
HISTORIES = {"CHANGELOG.md"}  # It tells of what is gone, so the names in it need not exist.
TODAY = [page for page in PAGES if page.name not in HISTORIES]

FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.*\n)+)")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.~-])(?:selfspec|tests|eval|docs|examples)/[\w./-]*")

over_pages_of_today = pytest.mark.parametrize("page", TODAY, ids=lambda page: page.name)


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


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


def test_links_and_files_exist() -> None:
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not re.match(r"[a-z]+:", target):
                assert path.exists(), f"{page}: {target} leads nowhere"
                assert not anchor or anchor in anchors_of(path), f"{page}: no heading for {target}"
    for page in TODAY:
        for name in (name for code in code_in(page) for name in PATH.findall(code)):
            assert (ROOT / name.rstrip(".")).exists(), f"{page}: {name} is not in the repository"


def test_every_page_of_docs_is_in_the_index() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS} - {"index.md"} <= linked


@over_pages_of_today
def test_commands_and_options_exist(page: Path) -> None:
    for words in commands_in(page, "selfspec"):
        if words[0] == "selfspec":  # Not such as selfspec.attach(model, spec)
            command, named = app, " ".join(words)
            for word in words[1:]:
                if word not in commands_below(command):
                    break
                command = command[word]
            missing = command.default_command is None and len(words) > 1 and words[1][0] != "-"
            assert not missing, f"{named}: no such command"
            assert options_in(words) <= options_of_selfspec(command) | {"--help"}, named
    for words in commands_in(page, "python -m eval"):
        named = " ".join(words)
        assert words[2] == "eval", f"{named}: no such module"
        assert {*words[3:4]} <= {*COMMANDS, "--help"}, f"{named}: no such command"
        known = options_of_eval(*words[3:4])
        assert options_in(words) <= known, f"{named}: no such option"
    if page.name != "CONTRIBUTING.md":  # It names options of other programs.
        known = options_of_selfspec(app).union(*map(options_of_eval, COMMANDS))
        for code in code_in(page):  # An option named alone: "`--restart` begins anew".
            assert not code.startswith("--") or options_in(code.split()) <= known, code


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
def options_of_eval(command: str = "--help") -> set[str]:
    """The options in the usage of a command."""
    said = StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit):
        main([command, "--help"])
    return {"--help", *re.findall(r"--[a-z-]+", said.getvalue().partition("\n\n")[0])}


@over_pages_of_today
def test_names_and_knobs_of_python_exist(page: Path) -> None:
    """Knobs in `SelfSpec(...)` and alone, as in `budget="fixed"`."""
    knobs = {field.name for field in fields(SpecConfig)}
    for code in code_in(page):
        for name in re.findall(r"(?<![\w./-])selfspec\.([A-Za-z]\w*)", code):
            known = hasattr(selfspec, name) or find_spec(f"selfspec.{name}") is not None
            assert known, f"selfspec.{name}"
        for name in re.findall(r"\bstats\.(\w+)", code):
            assert hasattr(GenerationStats(), name), f"stats.{name}"
        for call in re.findall(r"(?:SelfSpec|SpecConfig)\(([^()]*)\)", code):
            SpecConfig.of(**literals(call))
        if re.fullmatch(r"\w+=[^\s`]+", code) and code.partition("=")[0] in knobs:
            SpecConfig.of(**literals(code))


def literals(arguments: str) -> dict[str, Any]:
    """The knobs of a call by name, without the other arguments of `SelfSpec`."""
    others = inspect.signature(selfspec.SelfSpec).parameters
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    words = (word for word in call.keywords if word.arg not in others)
    return {str(word.arg): ast.literal_eval(word.value) for word in words}


def test_the_page_of_knobs_is_made_from_their_texts_and_has_every_value() -> None:
    """Run this file's `table_of_knobs` to make its table anew."""
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert table_of_knobs() in text
    known = (config.BUDGETS, config.FORWARDS, config.LEARNING_SCOPES, config.SOURCE_NAMES)
    for value in chain.from_iterable(known):
        assert f'"{value}"' in text, value


def table_of_knobs() -> str:
    rows = []
    for field in fields(SpecConfig):
        default = ", ".join(field.default) if field.name == "sources" else f"{field.default}"
        rows.append(f"| `{field.name}` | {default} | {knob_texts()[field.name]} |")
    return "\n".join(["| knob | default | what it does |", "|---|---|---|", *rows, ""])


def test_the_design_says_what_each_part_may_import() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (`\w+`(?:, `\w+`)*) \|$", text, re.MULTILINE)
    written = {part: set(re.findall(r"\w+", names)) for part, names in rows}
    assert len(written) >= 7
    assert written == {part: (ALLOWED[part] or set()) - {part} for part in written}


def test_the_version_is_told_in_one_way() -> None:
    """A version that is being made has no date."""
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    (number, date), *_ = re.findall(
        r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert project is not None
    assert project[1].removesuffix(".dev0") == number
    assert f"version: {project[1]}\n" in citation
    is_made = project[1].endswith(".dev0")
    assert is_made == (date == "unreleased") == ("date-released" not in citation)


def test_the_reference_is_that_of_the_docstrings() -> None:
    """Make it anew with `python -m tools.reference`."""
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page()
