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
pytestmark = pytest.mark.slow
pytest.importorskip("setuptools", "77", reason="the wheel is built without network")


def built(kind: str, sources: Path, folder: Path) -> Path:
    """The file that setuptools makes: an sdist or a wheel."""
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    (file,) = folder.iterdir()
    return file


def no_sources(folder: str, names: list[str]) -> set[str]:
    """What else lies in a clone: what was built, and environments of any name."""
    made = {name for name in names if Path(folder, name, "pyvenv.cfg").is_file()}
    return made | NO_SOURCES(folder, names)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the sdist holds, which is made from a copy: nothing is written here."""
    tmp_path = tmp_path_factory.mktemp("released")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=no_sources)
    shutil.unpack_archive(built("sdist", copy, tmp_path / "sdist"), tmp_path / "sources", "gztar")
    (folder,) = (tmp_path / "sources").iterdir()
    return folder


def files(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "egg-info" not in name}


def test_the_sdist_holds_all_but_what_starts_with_a_dot(sources: Path) -> None:
    made = {"PKG-INFO", "setup.cfg"}
    assert files(sources) - made == files(sources.parent.parent / "copy") - made


@pytest.fixture(scope="module")
def installed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    wheel, target = (tmp_path_factory.mktemp(name) for name in ("wheel", "target"))
    shutil.unpack_archive(built("wheel", sources, wheel), target, "zip")
    return target


def test_the_wheel_holds_the_package_with_its_model(sources: Path, installed: Path) -> None:
    assert files(installed / "selfspec") == files(sources / "selfspec")


def test_the_demo_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    surroundings = {**os.environ, "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "selfspec", "demo", "--seconds", "1"]
    said = subprocess.check_output(command, cwd=tmp_path, env=surroundings, text=True)
    assert "Same text: 3 of 3" in said
