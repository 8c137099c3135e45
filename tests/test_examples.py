"""Every script in examples/ runs with the embedded model, as a newcomer runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ARGUMENTS: dict[str, list[str]] = {
    "batch.py": ["--max-new-tokens", "8"],
    "chat.py": ["--message", "import os", "--message", "import sys", "--max-new-tokens", "8"],
    "drafted_tokens.py": ["--max-new-tokens", "8"],
    "edit_a_file.py": [],
    "own_answers_cache.py": ["--max-new-tokens", "8"],
    "pipeline_streaming.py": ["--max-new-tokens", "8"],
}
PRINTS = {
    "batch.py": "--- row 3",
    "chat.py": "tokens per step]",
    "drafted_tokens.py": "drafted, accepted",
    "edit_a_file.py": "with a prediction:",
    "own_answers_cache.py": "with the cache:",
    "pipeline_streaming.py": "tokens per step]",
}


def test_every_example_is_tried() -> None:
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert names == set(ARGUMENTS) == set(PRINTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / name
    # The examples import selfspec from the checkout, and measure into a folder of their own.
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), *ARGUMENTS[name]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=surroundings,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_an_example_is_short_and_takes_a_model(name: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert text.count("\n") <= 60
    assert '"--model"' in text
