"""Jobs that run in a process of their own: how they are started, and what comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from eval.errors import EvalError, last_line


def in_new_process(
    module: str, job: Any, what: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values of a job's result; `what` says in an error what failed.

    The module is run by itself. It reads the job as JSON from its standard input, and its last line
    is the result as JSON.
    """
    process = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job._asdict()),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise EvalError(f"{what}: {last_line(process.stderr)}")
    values: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return values
