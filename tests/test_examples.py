"""Every script in examples/ runs with the embedded model, as a newcomer runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What each is given, and what it prints.
FEW = ["--max-new-tokens", "8"]
EXAMPLES: dict[str, tuple[list[str], str]] = {
    "batch.py": (FEW, "--- row 3"),
    "chat.py": (["--message", "import os", "--message", "import sys", *FEW], "tokens per step]"),
    "drafted_tokens.py": (FEW, "drafted, accepted"),
    "edit_an_answer.py": (["--max-new-tokens", "32"], "with a prediction:"),
    "own_answers_cache.py": (FEW, "with the cache:"),
    "own_budget.py": (FEW, "tokens per step]"),
    "own_shape.py": (FEW, "tokens per step]"),
    "own_source.py": (FEW, "tokens per step]"),
    "pipeline_streaming.py": (FEW, "tokens per step]"),
    "ray_batch.py": ([], "--- def find_line("),
}


def test_every_example_is_tried() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    script, (arguments, printed) = ROOT / "examples" / name, EXAMPLES[name]
    # The examples import selfspec from the checkout, and measure into a folder of their own.
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    surroundings["RAY_USAGE_STATS_ENABLED"] = "0"
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=surroundings,
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
