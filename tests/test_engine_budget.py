"""The measured budget on a simulated clock: a scripted model whose forwards cost what a curve says.

The small form of `python -m eval replay --clock`, with curves that are not even, and with noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from selfspec.config import SpecConfig
from selfspec.cost import Budget, CostCurve, Ledger, MeasuredBudget
from tests.scripted import VOCAB, Prefix, Run, ScriptedBackend, ScriptedModel, TextSource

MODEL = ScriptedModel(5, order=9)
PROMPTS = [[1, 2, 3], [4, 5, 1], [2, 2, 5]]
LENGTH = 160

CURVES = {
    "flat": {1: 4.5, 16: 4.7, 64: 5.4},
    "half copies": {1: 159, 2: 159, 4: 177, 8: 265, 16: 432, 64: 1500},
    "packed": {1: 52, 2: 64, 4: 76, 8: 82, 16: 111, 64: 290},
    "row by row": {1: 166, 2: 271, 4: 529, 8: 978, 16: 2272, 64: 9000},
}

BY_CHUNKS = {"by chunks": {1: 100, 2: 170, 64: 250}}  # As several tokens of a running state.


class ClockedBackend(ScriptedBackend):
    """Forwards move the clock, by what `adjusted` makes of the seconds that the curve says."""

    def __init__(
        self,
        prompt: Sequence[int],
        curve: CostCurve,
        dice: random.Random,
        adjusted: Callable[[ClockedBackend, float], float] = lambda _backend, seconds: seconds,
    ) -> None:
        super().__init__(MODEL, [prompt])
        self.now, self.prompt = 0.0, prompt
        self._curve, self._dice, self._adjusted = curve, dice, adjusted

    def run(self, layout):
        seconds = self._curve.seconds(self.widths[-1]) * self._dice.lognormvariate(0, 0.08)
        self.now += self._adjusted(self, seconds)
        return super().run(layout)


def decode(backend: ClockedBackend, drafts: Any, length: int = LENGTH, **options: Any) -> None:
    """Writes an answer of this length, on the backend's clock."""
    run = Run(MODEL, [backend.prompt], [TextSource("scripted", drafts)], length, **options)
    run.backend = backend
    run.clock = lambda: backend.now
    run.decode()


def half_right(text: Prefix) -> list[int]:
    """The truth first at half of the places, second at a quarter."""
    truth, dice = MODEL.next_token(text), random.Random(f"{text[-9:]}")
    wrong = (truth + 1) % VOCAB
    return dice.choice([[truth, wrong], [truth, wrong], [wrong, truth], [wrong]])


def wrong(text: Prefix) -> list[int]:
    """The truth never, and sure of that."""
    return [(MODEL.next_token(text) + 1) % VOCAB]


def speed(curve: CostCurve, drafts, new_budget, max_nodes: int = 32) -> float:
    """Plain steps' time over that of all prompts, one after the other."""
    dice, total, tokens = random.Random(3), 0.0, 0
    for prompt in PROMPTS:
        backend, config = ClockedBackend(prompt, curve, dice), SpecConfig(max_nodes=max_nodes)
        decode(backend, drafts, config=config, budget=new_budget())
        total += backend.now
        tokens += LENGTH - len(prompt) - 1
    return tokens * curve.seconds(1) / total


def measured(start: CostCurve):
    ledger = Ledger()
    return lambda: MeasuredBudget(start, ledger=ledger)


@pytest.mark.parametrize("name", CURVES)
def test_it_comes_near_the_best_fixed_width_whatever_was_expected(name):
    curve = CostCurve(CURVES[name])
    best = max(speed(curve, half_right, Budget, width) for width in (1, 2, 4, 8, 16))
    for slope in (0.01, 0.2):
        ours = speed(curve, half_right, measured(CostCurve.unknown(slope)))
        assert ours > 0.95 * best, slope


@pytest.mark.parametrize("name", CURVES | BY_CHUNKS)
@pytest.mark.parametrize("kept", ["flat", "row by row"])
def test_it_never_loses_whatever_an_earlier_process_wrote_down(name, kept):
    """The worst of all: no draft is ever right, and what steps cost is not what it was."""
    curve = CostCurve((CURVES | BY_CHUNKS)[name])
    start = CostCurve(CURVES[kept]).of_other_length()
    assert speed(curve, wrong, measured(start)) > 0.97


def test_what_later_steps_use_too_is_no_cost_of_a_step() -> None:
    """As a capture, which would make its width look dear."""

    class Captured(ClockedBackend):
        def lay_out(self, rows, trees):
            width = max(len(tree.tokens) for tree in trees)
            self.setting_up = 0.0 if width in self.widths else 100.0
            self.now += self.setting_up
            return super().lay_out(rows, trees)

    curve = CostCurve(CURVES["flat"])
    budget = MeasuredBudget(CostCurve.unknown(0.01))
    backend = Captured(PROMPTS[0], curve, random.Random(3))
    decode(backend, half_right, config=SpecConfig(max_nodes=8), budget=budget)
    assert len(set(backend.widths)) > 2
    assert budget.curve.seconds(8) < 2 * curve.seconds(8)


def widths_beside(slowness: Callable[[int, int], float]) -> list[int]:
    """The widths of an answer with drafts that are half right, beside other work.

    `slowness` is asked for each forward: how many were run before, and how wide it is.
    """

    def adjusted(backend: ClockedBackend, seconds: float) -> float:
        return seconds * slowness(len(backend.widths) - 1, backend.widths[-1])

    backend = ClockedBackend(PROMPTS[0], CostCurve(CURVES["flat"]), random.Random(3), adjusted)
    decode(backend, half_right, budget=MeasuredBudget(CostCurve.unknown(0.2)), config=SpecConfig())
    return backend.widths


def test_one_unlucky_step_does_not_end_the_drafts_of_an_answer() -> None:
    """Drafts are tried again within the same answer, and then they go on."""
    unlucky = []

    def first_wide_one(number: int, width: int) -> float:
        if width > 1 and not unlucky:
            unlucky.append(number)
            return 14.0
        return 1.0

    widths = widths_beside(first_wide_one)
    again = next(n for n, width in enumerate(widths) if n > unlucky[0] and width > 1)
    assert again - unlucky[0] < 80
    assert sum(width > 1 for width in widths[again:]) > 20


def test_a_slow_moment_of_the_machine_is_no_slow_width() -> None:
    """Plain steps and others take three times as long for a while: what is drafted stays alike."""
    widths = widths_beside(lambda _number, _width: 1.0)
    others = widths_beside(lambda number, _width: 3.0 if number > 4 else 1.0)
    assert sum(width > 1 for width in others) > 0.8 * sum(width > 1 for width in widths)


# On a busy machine, a plain step takes so many times as long, and any wider one between so many
# plain steps; None: as many as on a quiet one.
QUIET, MILD, HARD = (1.0, None), (1.4, None), (1.4, (9.0, 17.0))


def times_of_plain_steps(machines: Sequence[Any], *, one_spec: bool) -> list[float]:
    """Each call's time over that of plain steps on the same machine, with drafts that mostly pay.

    Calls come one after the other. Those of one `SelfSpec` know what the earlier ones have learned.
    """
    quiet, dice, times = CostCurve(CURVES["packed"]), random.Random(3), []
    curve, ledger = CostCurve.unknown(0.2), Ledger()
    for number, (factor, waits) in enumerate(machines):
        if not one_spec:
            curve, ledger = CostCurve.unknown(0.2), Ledger()

        def adjusted(
            backend: ClockedBackend, seconds: float, factor: float = factor, waits: Any = waits
        ) -> float:
            if waits is not None and backend.widths[-1] > 1:
                seconds = quiet.seconds(1) * dice.uniform(*waits)
            return factor * seconds

        prompt = PROMPTS[number % 3]
        backend = ClockedBackend(prompt, quiet, dice, adjusted)
        budget = MeasuredBudget(curve, ledger=ledger)
        decode(backend, mostly_right, 256, budget=budget, config=SpecConfig())
        times.append(backend.now / (factor * quiet.seconds(1) * (256 - len(prompt) - 1)))
    return times


def mostly_right(text: Prefix) -> list[int]:
    """The truth at six of seven places."""
    truth, dice = MODEL.next_token(text), random.Random(f"{text[-9:]}")
    return [truth] if dice.random() < 6 / 7 else [(truth + 1) % VOCAB]


def test_wide_steps_that_stay_slow_count_in_full() -> None:
    """Threads of wide steps wait for each other here: each takes as long as 9 to 17 plain ones.

    A first call loses two tries, and the next calls with the model remember it.
    """
    new = times_of_plain_steps([HARD] * 9, one_spec=False)
    assert sum(new) / len(new) < 1.1
    first, *others = times_of_plain_steps([HARD] * 9, one_spec=True)
    assert first < 1.1
    assert sum(others) / len(others) < 1.02


def test_drafts_go_on_once_the_machine_is_free_again() -> None:
    quiet = times_of_plain_steps([QUIET] * 4, one_spec=True)
    calls = times_of_plain_steps([QUIET, QUIET, HARD, HARD, QUIET, QUIET], one_spec=True)
    assert max(calls[2:4]) < 1.1
    assert calls[:2] == quiet[:2]
    assert calls[5] < 1.1 * quiet[3]
    others = times_of_plain_steps([MILD] * 4, one_spec=True)
    assert sum(others) < 1.05 * sum(quiet)


def test_each_length_of_a_text_teaches_its_own_curve() -> None:
    """A long text must not say what short ones cost. A text that grows is no new start."""
    curves: dict[int, CostCurve] = {}

    def adjusted(backend: ClockedBackend, seconds: float) -> float:
        """Forwards take twice as long from 256 tokens on."""
        return seconds * (2.0 if backend.tree_start >= 256 else 1.0)

    def curve_of(backend: ScriptedBackend) -> CostCurve:
        first = 256 if backend.tree_start >= 256 else 0
        if first not in curves:
            curves[first] = curves[0].of_other_length() if first else CostCurve.unknown(0.2)
        return curves[first]

    backend = ClockedBackend(PROMPTS[0], CostCurve(CURVES["flat"]), random.Random(3), adjusted)
    budget = MeasuredBudget()
    decode(backend, half_right, 600, budget=budget, config=SpecConfig(), curve=curve_of)
    assert curves[0].seconds(1) == pytest.approx(4.5, rel=0.1)
    assert curves[256].seconds(1) > 1.5 * curves[0].seconds(1)
    assert backend.widths.count(1) < 20
