"""What is released: the sdist holds the tests, and the wheel made of it all that the demo needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NO_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
pytest.importorskip("setuptools", "77", reason="the wheel is built without network")


def built(kind: str, sources: Path, folder: Path) -> Path:
    """The file that setuptools makes: an sdist or a wheel."""
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with what the sdist holds, which is made from a copy: nothing is written here."""
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=NO_SOURCES)
    shutil.unpack_archive(built("sdist", copy, tmp_path / "sdist"), tmp_path / "sources", "gztar")
    (folder,) = (tmp_path / "sources").iterdir()
    return folder


@pytest.fixture
def installed(sources: Path, tmp_path: Path) -> Path:
    """A folder with what the wheel holds."""
    shutil.unpack_archive(built("wheel", sources, tmp_path / "wheel"), tmp_path / "target", "zip")
    return tmp_path / "target"


def test_the_sdist_holds_all_but_what_starts_with_a_dot(sources: Path) -> None:
    def files(folder: Path) -> set[str]:
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        return {name for name in names if "egg-info" not in name}

    made = {"PKG-INFO", "setup.cfg"}
    assert files(sources) - made == files(sources.parent.parent / "copy") - made


def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    surroundings = {**os.environ, "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.check_output(command, cwd=tmp_path, env=surroundings, text=True)

    names = "import selfspec.building.recipe as r; print(r.__file__, len(r.recipe_names()))"
    where, num_recipes = run("-c", names).split()
    assert Path(where).is_relative_to(installed)
    assert num_recipes == "6"
    assert "Same text: 3 of 3" in run("-m", "selfspec.cli", "demo", "--seconds", "1")
