"""What a `SelfSpec` has learned, on disk between two steps of a build.

A build restores what it saved before each step, even if nothing was interrupted. So a build that
was killed and goes on ends with the same bytes as one that was not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.memory import Memory
from selfspec.draft.sources import LastingSource
from selfspec.machine.user_files import replacing
from selfspec.plugin.spec import SelfSpec


class Learned:
    """The memory of one `SelfSpec` as files, one for each step that a build has saved."""

    def __init__(self, folder: Path, spec: SelfSpec, vocab_size: int) -> None:
        self._folder = folder
        self._spec = spec
        self._vocab_size = vocab_size

    @property
    def memory(self) -> Memory:
        """What is known now."""
        return self._spec.memory(self._vocab_size)

    def steps(self) -> list[int]:
        """The steps that `restore` can go back to; always with 0, the start."""
        return sorted({0, *(int(path.stem) for path in self._folder.glob("*.npz"))})

    def save(self, step: int) -> None:
        """Writes down what is known after `step`."""
        memory = self.memory
        arrays: dict[str, Any] = {
            f"{source}.{name}": array
            for source, tables in memory.tables().items()
            for name, array in tables.items()
        }
        rates = json.dumps(memory.calibration.rows(None)).encode()
        arrays["rates"] = np.frombuffer(rates, np.uint8)
        with replacing(self._file(step)) as file:
            np.savez(file, **arrays)

    def restore(self, step: int) -> None:
        """Makes the memory what it was after `step`."""
        self._spec.forget()
        if step == 0:
            return
        memory = self.memory
        with np.load(self._file(step)) as held:
            memory.calibration.restore(json.loads(held["rates"].tobytes()))
            for source in memory.sources:
                if isinstance(source, LastingSource):
                    source.restore(_part(held, source.name))

    def keep_only(self, step: int) -> None:
        """Deletes what was saved for any other step."""
        for path in self._folder.glob("*.npz"):
            if path != self._file(step):
                path.unlink()

    def _file(self, step: int) -> Path:
        return self._folder / f"{step}.npz"


def _part(held: Any, source: str) -> dict[str, NDArray[Any]]:
    names = [name for name in held.files if name.startswith(f"{source}.")]
    return {name.removeprefix(f"{source}."): held[name] for name in names}
