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

# What each part may import of ours: the table of docs/design.md.
_COMPAT = {"compat"}
_DRAFT = {"config", "draft", "errors", "records"}
_VERIFY = {"config", "machine", "records", "verify"}
_BELOW = _COMPAT | {"attention", "errors", "machine"}
_FORWARD = _BELOW | {"cost", "records", "weights"}
_NEURAL = _FORWARD | _DRAFT | {"forward"}
_RUN = _NEURAL | {"ability", "config", "cuda", "kept_kv", "neural", "runner"}
_ENGINE = _DRAFT | _VERIFY | _RUN | {"stats"}
_PROMPT = {"prompt", "row_rules"}
ALLOWED: dict[str, set[str] | None] = {
    "errors": set(),
    "compat": {"errors"},
    "config": {"errors", "machine"},
    "records": set(),
    "stats": {"records"},
    "machine": {"compat", "errors"},
    "attention": {"compat"},
    "draft": _DRAFT,
    "verify": _VERIFY,
    "cost": {"records"},
    "weights": _BELOW,
    "forward": _FORWARD,
    "ability": _FORWARD | {"forward"},
    "cuda": _FORWARD | {"ability", "forward"},
    "neural": _NEURAL,
    "kept_kv": _FORWARD | {"forward"},
    "runner": _RUN | {"stats"},
    "row": _DRAFT | _VERIFY | {"errors", "forward", "stats"},
    "row_rules": {"row", "verify"},
    "prompt": _ENGINE | {"row", "row_rules"},
    "learning": _DRAFT | _VERIFY | _RUN | {"row"},
    "drafts": _VERIFY | {"cost", "row"},
    "sharing": _ENGINE | {"prompt", "row"},
    "engine": _ENGINE | {"drafts", "learning", "prompt", "row", "sharing"},
    "session": _ENGINE | {"engine", "prompt", "row", "row_rules"},
    "cache": {"config", "draft", "errors", "machine"},
    "plugin": _ENGINE | {*_PROMPT, "engine", "learning", "row", "cache", "session"},
    "batch": _ENGINE | {*_PROMPT, "plugin", "session"},
    "serving": _ENGINE | {"batch", "plugin", "prompt", "session"},
    "building": {"cache", "draft", "errors"},
    "cli": EVERYTHING,
    "__main__": EVERYTHING,
    "": EVERYTHING,  # selfspec/__init__.py
}
# Parts and modules that import no torch, and those that may import transformers.
NO_TORCH = (
    "selfspec.compat.versions",
    "selfspec.cache",
    "selfspec.config",
    "selfspec.cost",
    "selfspec.draft",
    "selfspec.errors",
    "selfspec.machine.user_files",
    "selfspec.records",
    "selfspec.cli.batch_file",
    "selfspec.cli.prompt_files",
    "selfspec.serving.encoder",
    "selfspec.serving.fields",
    "selfspec.serving.messages",
    "selfspec.serving.schema",
    "selfspec.stats",
    "selfspec.verify.walk",
)
TRANSFORMERS = {
    *("ability", "batch", "building", "cli", "compat"),
    *("forward", "neural", "plugin", "prompt", "row_rules", "session", "weights"),
}

FILES = sorted(
    path for path in ROOT.rglob("*.py") if "hub" not in path.relative_to(ROOT).parts
)  # hub/ is copied into repositories of others and imports selfspec from outside
EVAL = sorted((ROOT.parent / "eval").rglob("*.py"))
WITH_EXAMPLES = [path for path in (*FILES, *EVAL) if ">>> " in path.read_text(encoding="utf-8")]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def part_of(module: str) -> str:
    """The row of the table: ``selfspec.draft.sources.lut`` belongs to ``draft``."""
    return [*module.split("."), ""][1]


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The whole syntax of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module that a file names, absolutely."""
    found: set[str] = set()
    for node in nodes_of(path):
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


def test_a_module_imports_only_what_the_table_allows():
    for path in FILES:
        part = part_of(name_of(path))
        assert part in ALLOWED, f"{part} is not in the table of the design: add it there and here"
        assert not third_party(path) & {"caches", "eval", "tests"}, path
        if ALLOWED[part] is not EVERYTHING:
            ours = {name for name in imports_of(path) if name.split(".")[0] == "selfspec"}
            assert {part_of(name) for name in ours} - {part} <= ALLOWED[part], path


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """The modules that import each other in a circle, or import one that does."""
    left = dict(imports)
    while leaves := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in leaves:
            del left[name]
    return set(left)


def test_no_files_of_a_room_import_each_other_in_a_circle():
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    for room in ALLOWED:
        files = {name_of(path): path for path in FILES if part_of(name_of(path)) == room}
        imports = {name: set(imports_of(path)) - {name} for name, path in files.items()}
        assert in_circles(imports) == set(), room


def test_torch_and_transformers_stay_in_their_rings():
    for path in FILES:
        part = part_of(name_of(path))
        if f"{name_of(path)}.".startswith(tuple(f"{name}." for name in NO_TORCH)):
            assert "torch" not in third_party(path), path
        if part not in TRANSFORMERS and part:
            assert "transformers" not in third_party(path), path


# Strings that begin with an underscore and are our own: attributes that `attach` sets on a model.
OUR_STRINGS = {"_", "_selfspec_attachment"}
OUR_OBJECTS = {"self", "cls", "spec"}
# Ways around a private name: bytecode, frames of callers, the classes behind a class.
BACK_DOORS = {"__bases__", "__code__", "__mro__", "__self__", "__subclasses__", "_getframe"}


@cache
def own_private_names() -> frozenset[str]:
    """Every name with an underscore in front that our own code defines."""
    found: set[str] = {"_asdict", "_fields", "_replace"}  # Public names of named tuples.
    for node in (node for path in FILES for node in nodes_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in OUR_OBJECTS:
            found |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return frozenset(found)


def foreign_private_names(path: Path) -> list[str]:
    """What a file asks of the inside of other libraries, in code and in strings."""
    foreign = []
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            name, ours = node.attr, own_private_names()
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            name, ours = str(node.value), OUR_STRINGS
        else:
            if isinstance(node, ast.ImportFrom) and not node.module.startswith("selfspec"):
                names = (*node.module.split("."), *(alias.name for alias in node.names))
                foreign += [x for x in names if x.startswith("_") and x != "__future__"]
            continue
        is_private = name.startswith("_") and not name.startswith("__")
        if name in BACK_DOORS or (is_private and name not in ours):
            foreign.append(name)
    return foreign


def test_private_names_of_others_are_in_one_part():
    for path in FILES:
        if part_of(name_of(path)) != "compat":
            foreign = foreign_private_names(path)
            assert not foreign, f"{path}: selfspec/compat is the place for {foreign}"


# What makes a tensor out of nothing, on the default device where none is named.
MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("hann_window", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn"),
    *("randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
}


# These have the default dtype if none is named, whatever they are filled with.
FLOATS = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def test_every_tensor_names_its_device_and_its_dtype():
    """A user's default device may be another one, such as ``meta``, and so may the dtype."""
    for node in (node for path in FILES for node in nodes_of(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            name = ast.unparse(node.func).removeprefix("torch.")
            named = {keyword.arg for keyword in node.keywords}
            is_nameless = name in MAKERS and "device" not in named
            is_nameless |= name == "Generator" and not node.args
            assert not is_nameless, f"add device= to {ast.unparse(node)}"
            assert name not in FLOATS or "dtype" in named, f"add dtype= to {ast.unparse(node)}"


def test_the_package_has_all_that_it_offers():
    """Most of it is imported when it is first asked for."""
    assert all(hasattr(selfspec, name) for name in selfspec.__all__)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_examples_in_docstrings_run(path):
    results = doctest.testmod(importlib.import_module(name_of(path)))
    assert results.attempted > 0
    assert results.failed == 0


def test_knobs_errors_and_sources_come_without_torch():
    """So that a command line answers at once."""
    code = (
        "import sys, selfspec, selfspec.draft.tree, selfspec.draft.sources, selfspec.cache;"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch came along'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
