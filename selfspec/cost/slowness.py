"""Whether steps with drafts are slow by bad luck, or because the machine is busy.

On a busy machine the threads of a wide step may wait for each other, where a plain step needs one
thread and waits for nobody. Then a wide step may take as long as many plain ones.
"""

from __future__ import annotations

from typing import NamedTuple

# Slow steps are bad luck as long as there are fewer in a row.
_IN_A_ROW = 2
# The machine is free again once plain steps take less than three quarters of what they took.
_FREE = 0.75


class TimedStep(NamedTuple):
    """A step's width and seconds; in plain steps, the most that is not slow, and its charge."""

    width: int
    seconds: float
    most: float
    charged: float


class Slowness:
    """Holds back what slow steps took too long, and charges it once the slowness lasts.

    One slow step says nothing. After two without a good one in between, a plain step is timed. If
    that is not slow too, both are charged in full, and so is every further slow step, until a wide
    step takes what is expected of it, or plain steps take less.
    """

    def __init__(self) -> None:
        self._doubted: list[TimedStep] = []  # Slow steps that may be bad luck.
        self._last_plain = 0.0  # The seconds of the last plain step.
        self._plain_then = 0.0  # The most that plain steps took since slowness lasts; else 0.

    @property
    def needs_plain(self) -> bool:
        """Must the next step be plain, to say whether the machine is slow as a whole?"""
        return len(self._doubted) >= _IN_A_ROW

    def observe(self, step: TimedStep, plain: float) -> float:
        """What to charge in addition after a step, in plain steps of `plain` seconds."""
        if step.width == 1:
            self._last_plain = step.seconds
            is_certain = self.needs_plain
        elif step.seconds > step.most * max(plain, self._last_plain):
            self._doubted.append(step)
            is_certain = self._plain_then > 0
        else:
            self._doubted, self._plain_then = [], 0.0
            return 0.0
        missing = self._missing(plain) if is_certain else 0.0
        if missing or self._plain_then:
            self._plain_then = max(self._plain_then, plain)
        return missing

    def is_over(self, plain: float) -> bool:
        """Is the machine free again, by what plain steps take? Says so once."""
        if plain >= _FREE * self._plain_then:
            return False
        self._plain_then = 0.0
        return True

    def _missing(self, plain: float) -> float:
        doubted, self._doubted, now = self._doubted, [], max(plain, self._last_plain)
        slow = [step for step in doubted if step.seconds > step.most * now]
        return sum(step.seconds / now - step.charged for step in slow)
