"""The built wheel holds all that the demo needs: it is run with the sources out of reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "selfspec")
pytest.importorskip("setuptools", "77", reason="the wheel is built without network")


BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with what the wheel holds; the wheel is built from a copy, which stays clean."""
    copy, wheels, target = (tmp_path / name for name in ("copy", "wheels", "target"))
    copy.mkdir()
    for name in SOURCES:
        put = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        put(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", BUILD, wheels], cwd=copy, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    shutil.unpack_archive(wheel, target, "zip")
    return target


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
