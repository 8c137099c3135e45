"""Methods that answer in turns, round by round, so that what a machine does meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from eval.methods.names import rotated

Found = TypeVar("Found")


def in_turns(
    names: Sequence[str],
    rounds: int,
    answer: Callable[[str], Found],
    told: Callable[[Found], str],
    what: str = "",
) -> dict[str, list[Found]]:
    """What came of each method, in the order of the rounds; each goes first in turn.

    `told` says of an outcome what is printed meanwhile, and `what` what it belongs to.
    """
    found: dict[str, list[Found]] = {name: [] for name in names}
    for number in range(rounds):
        for name in rotated(names, number):
            found[name].append(answer(name))
            print(f"{what}round {number + 1}: {name} {told(found[name][-1])}", flush=True)
    return found
