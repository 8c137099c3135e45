"""The rings hold: token ids below, tensors in the middle, transformers at the edge.

Reads the imports by `ast`, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import selfspec

ROOT = Path(selfspec.__file__).parent
EVERYTHING = None

# What each room may import of ours: the table of docs/design.md.
_COMPAT = {"compat"}
_DRAFT = {"config", "draft", "records"}
_VERIFY = {"config", "machine", "records", "verify"}
_RUN = _COMPAT | {"config", "cost", "errors", "machine", "records", "run"}
_ENGINE = _DRAFT | _VERIFY | _RUN | {"stats"}
ALLOWED: dict[str, set[str] | None] = {
    "errors": set(),
    "compat": {"errors"},
    "config": {"errors"},
    "records": set(),
    "stats": {"records"},
    "machine": {"compat", "errors"},
    "draft": _DRAFT,
    "verify": _VERIFY,
    "cost": {"records"},
    "run": _RUN,
    "sequence": _DRAFT | _VERIFY | {"stats"},
    "engine": _ENGINE | {"sequence"},
    "cache": {"config", "draft", "errors", "machine"},
    "engines": {"cache", "config", "draft", "errors", "records"},
    "papers": _RUN | _DRAFT | {"cache"},
    "plugin": _ENGINE | {"engine", "sequence", "cache", "papers"},
    "batch": {*_ENGINE, "engine", "sequence", "plugin"},
    "serving": {*_ENGINE, "engine", "plugin", "batch"},
    "building": {*_ENGINE, "batch", "engine", "plugin", "cache", "serving"},
    "cli": EVERYTHING,
    "": EVERYTHING,  # selfspec/__init__.py
}
MOST_MODULES_ON_TOP = 9
# Rooms and modules that import no torch, and those that may import transformers.
NO_TORCH = (
    "selfspec.compat.versions",
    "selfspec.cache",
    "selfspec.config",
    "selfspec.cost",
    "selfspec.draft",
    "selfspec.engines",
    "selfspec.errors",
    "selfspec.machine.measured",
    "selfspec.machine.user_files",
    "selfspec.records",
    "selfspec.serving.batch_file",
    "selfspec.serving.prompt_files",
    "selfspec.serving.schema",
    "selfspec.stats",
    "selfspec.verify.walk",
)
TRANSFORMERS = {"building", "cli", "compat", "engines", "plugin", "run"}

FILES = sorted(
    path for path in ROOT.rglob("*.py") if "hub" not in path.relative_to(ROOT).parts
)  # hub/ is copied into repositories of others and imports selfspec from outside
EVAL = sorted(path for path in (ROOT.parent / "eval").rglob("*.py") if path.stat().st_size)
WITH_EXAMPLES = [path for path in (*FILES, *EVAL) if ">>> " in path.read_text(encoding="utf-8")]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def part_of(module: str) -> str:
    """The row of the table: ``selfspec.draft.sources.lut`` belongs to ``draft``."""
    return [*module.split("."), ""][1]


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module that a file names, absolutely."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            found.add(node.module)
            if node.module in ("eval", "selfspec"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def third_party(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_imports_only_what_the_table_allows(path):
    part = part_of(name_of(path))
    assert part in ALLOWED, f"{part} is not in the table of the design: add it there and here"
    if ALLOWED[part] is EVERYTHING:
        return
    ours = {name for name in imports_of(path) if name.split(".")[0] == "selfspec"}
    assert {part_of(name) for name in ours} - {part} <= ALLOWED[part]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_torch_and_transformers_stay_in_their_rings(path):
    part = part_of(name_of(path))
    if f"{name_of(path)}.".startswith(tuple(f"{name}." for name in NO_TORCH)):
        assert "torch" not in third_party(path)
    if part not in TRANSFORMERS and part:
        assert "transformers" not in third_party(path)


def test_streamed_weights_are_a_room_of_their_own():
    """Only the one door, and the loader, know of them."""
    room = "selfspec.run.streamed"
    doors = {"selfspec.plugin.loading", "selfspec.run.prepared"}
    for path in FILES:
        ours = {name for name in imports_of(path) if name.startswith("selfspec")}
        if name_of(path).startswith(room):
            others = {part_of(name) for name in ours if not name.startswith(room)}
            assert others <= {"compat", "errors", "machine", "records"}, path
        elif name_of(path) not in doors:
            assert not any(name.startswith(room) for name in ours), path


# Strings that begin with an underscore and are our own: attributes that `attach` sets on a model.
OUR_STRINGS = {"_", "_default_assistant", "_methods_before_attach"}
# Ways around a private name: bytecode, frames of callers, the classes behind a class.
BACK_DOORS = {"__bases__", "__code__", "__mro__", "__self__", "__subclasses__", "_getframe"}


@cache
def own_private_names() -> frozenset[str]:
    """Every name with an underscore in front that our own code defines."""
    found: set[str] = {"_asdict", "_fields", "_replace"}  # Public names of named tuples.
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value
                if isinstance(owner, ast.Name) and owner.id in ("self", "cls", "spec"):
                    found.add(node.attr)
    return frozenset(found)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_of_others_are_in_one_room(path):
    if part_of(name_of(path)) == "compat":
        return
    foreign = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if node.attr in BACK_DOORS or (is_private and node.attr not in own_private_names()):
                foreign.append(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_private = node.value.isidentifier() and node.value.startswith("_")
            if node.value in BACK_DOORS or (
                is_private and not node.value.startswith("__") and node.value not in OUR_STRINGS
            ):
                foreign.append(node.value)
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith("selfspec"):
            names = (*node.module.split("."), *(alias.name for alias in node.names))
            foreign += [x for x in names if x.startswith("_") and x != "__future__"]
    assert not foreign, f"{path}: selfspec/compat is the room for {foreign}"


# What makes a tensor out of nothing, on the default device where none is named.
MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("hann_window", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn"),
    *("randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_tensor_names_its_device(path):
    """A user's default device may be another one, such as ``meta``."""
    nameless = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id == "torch":
            is_named = any(keyword.arg == "device" for keyword in node.keywords)
            if (name in MAKERS and not is_named) or (name == "Generator" and not node.args):
                nameless.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert not nameless, f"{path}: add device= to {nameless}"


def test_rooms_and_not_modules_side_by_side():
    on_top = [path.name for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    assert len(on_top) <= MOST_MODULES_ON_TOP, on_top


@pytest.mark.parametrize(
    ("room", "known_by"), [("cli", {"cli"}), ("serving", {"building", "cli", "serving"})]
)
def test_only_the_cli_knows_the_cli_and_the_server(room, known_by):
    """Whoever uses the library alone needs none of what a server needs."""
    for path in FILES:
        names = {part_of(name) for name in imports_of(path) if name.startswith("selfspec.")}
        assert room not in names or part_of(name_of(path)) in known_by, path


def test_nothing_knows_the_tests_or_the_evaluation():
    for path in FILES:
        assert not third_party(path) & {"caches", "eval", "tests"}, path


def test_the_package_has_all_that_it_offers():
    """Most of it is imported when it is first asked for."""
    assert all(hasattr(selfspec, name) for name in selfspec.__all__)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_examples_in_docstrings_run(path):
    results = doctest.testmod(importlib.import_module(name_of(path)))
    assert results.attempted > 0
    assert results.failed == 0


def test_there_are_examples_where_they_say_it_best():
    modules = {"selfspec.config", "selfspec.errors", "selfspec.run.layout"}
    assert modules <= set(map(name_of, WITH_EXAMPLES))


@pytest.mark.parametrize("path", [*FILES, *EVAL], ids=name_of)
def test_every_module_says_its_job(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring
    assert docstring.split("\n\n")[0].rstrip().endswith((".", ":", "?")), docstring


def test_knobs_and_errors_come_without_torch():
    """So that a command line answers at once."""
    code = (
        "import sys, selfspec, selfspec.draft.tree, selfspec.draft.sources;"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch came along'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
