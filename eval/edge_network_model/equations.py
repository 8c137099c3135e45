"""The equations of edge networks: two base stations, a pipeline, and the band that users share.

What is read otherwise than in the paper: the growth of keys and values within a draft is counted,
and the first forward of each model reads the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Model(NamedTuple):
    """A decoder of table I."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int

    @property
    def num_weights(self) -> int:
        """Equation 9: four square matrices and the two of the FFN in each layer."""
        per_layer = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.ffn_size
        return self.num_layers * per_layer

    @property
    def kv_bytes(self) -> int:
        """Equation 10: keys and values of a token, in float16."""
        return 4 * self.num_layers * self.hidden_size


class Task(NamedTuple):
    """One prompt: its tokens, and those that its answer will have, which no plan knows."""

    input_length: int
    output_length: int


class Stations(NamedTuple):
    """Both base stations, the one that drafts first, and what is asked of them."""

    models: tuple[Model, Model]
    fixed: tuple[float, float]  # The seconds of a forward, whatever it computes.
    speeds: tuple[float, float]  # FLOPS.
    acceptance: float  # The chance that a draft is accepted.
    longest_output: int
    memory: float  # Of the one that drafts, in bytes.

    def fits(self, num_rows: int, input_length: int) -> bool:
        """Constraint 24b: a batch leaves the memory whole, whatever is answered."""
        tokens, draft = num_rows * (input_length + self.longest_output), self.models[0]
        return 2 * draft.num_weights + tokens * draft.kv_bytes <= self.memory


class Plan(NamedTuple):
    """Batches in the order in which they run, and how many tokens each step drafts."""

    batches: tuple[tuple[Task, ...], ...]
    length: int
    expected: float  # Seconds, if every answer is as long as answers can be.


def tokens_per_step(length: int, acceptance: float) -> float:
    """Equation 7."""
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def flops(model: Model, new: Array | float, held: Array | float) -> Array:
    """Equations 11 and 12: a forward of `new` tokens of a row with `held` keys and values."""
    weights = 2.0 * model.num_weights * np.asarray(new)
    attention = 4.0 * model.num_layers * model.hidden_size
    return np.asarray(weights + attention * np.asarray(new) * (np.asarray(held) + new))


def stages(
    stations: Stations, num_rows: Array, inputs: Array, length: int, num_steps: int
) -> tuple[Array, Array]:
    """Equations 13, 14 and 17: the seconds to draft and to verify, (batches, steps)."""
    (draft, verify), (launch, check), (draft_speed, verify_speed) = stations[:3]
    rows, inputs = num_rows[:, None], inputs[:, None]
    steps = np.arange(num_steps)[None, :]
    held = inputs + steps * tokens_per_step(length, stations.acceptance)
    work = np.zeros_like(held)
    for number in range(length):
        is_first = (steps == 0) & (number == 0)
        work += np.where(is_first, flops(draft, inputs, 0.0), flops(draft, 1.0, held + number))
    prompts, others = flops(verify, inputs + length, 0.0), flops(verify, length + 1.0, held)
    checked = np.where(steps == 0, prompts, others)
    return length * launch + rows * work / draft_speed, check + rows * checked / verify_speed


def seconds_of(
    stations: Stations, batches: Sequence[Sequence[Task]], length: int, *, overlap: bool = True
) -> float:
    """Equations 20 to 22: the seconds of all steps; without `overlap`, both work in turns.

    A batch takes no time after its longest answer.
    """
    per_step = tokens_per_step(length, stations.acceptance)
    lasting = [math.ceil(max(task.output_length for task in own) / per_step) for own in batches]
    rows = np.array([float(len(own)) for own in batches])
    inputs = np.array([float(max(task.input_length for task in own)) for own in batches])
    active = np.arange(max(lasting)) < np.array(lasting)[:, None]
    drafting, verifying = stages(stations, rows, inputs, length, max(lasting))
    drafting, verifying = drafting * active, verifying * active
    if not overlap:
        return float(drafting.sum() + verifying.sum())
    drafted, verified = np.zeros((2, max(lasting)))
    for draft, verify in zip(drafting, verifying, strict=True):
        drafted = drafted + draft
        # A batch that is done leaves the step as it was.
        verified = np.where(verify > 0, np.maximum(drafted, verified) + verify, verified)
    return float(verified.sum())


def best_batches(stations: Stations, tasks: Sequence[Task], length: int) -> Plan:
    """Algorithm 1: sorted by input, split by the rule that keeps one boundary for each prompt.

    With j the end of the last batch but one, a batch that ends at n is drafted in each step s at
    f1_s(n) = f1_s(j) + draft_s and verified at f2_s(n) = max(f1_s(n), f2_s(j)) + verify_s. The
    boundary with the least sum of f2 stays, which is not exact. All answers count as the longest.
    """
    ordered = sorted(tasks)
    num_steps = math.ceil(stations.longest_output / tokens_per_step(length, stations.acceptance))
    drafted, verified = np.zeros((2, len(ordered) + 1, num_steps))
    boundary = [0]
    for end in range(1, len(ordered) + 1):
        longest = ordered[end - 1].input_length
        starts = [j for j in range(end) if stations.fits(end - j, longest)]
        rows = np.array([float(end - start) for start in starts])
        inputs = np.full(len(starts), float(longest))
        draft, verify = stages(stations, rows, inputs, length, num_steps)
        first = drafted[starts] + draft
        second = np.maximum(first, verified[starts]) + verify
        best = int(second.sum(axis=1).argmin())
        drafted[end], verified[end] = first[best], second[best]
        boundary.append(starts[best])
    batches: list[tuple[Task, ...]] = []
    end = len(ordered)
    while end:  # The batches that lead to the last prompt.
        batches.insert(0, tuple(ordered[boundary[end] : end]))
        end = boundary[end]
    return Plan(tuple(batches), length, float(verified[-1].sum()))


def bandwidth_shares(seconds_alone: Sequence[float]) -> tuple[float, list[float]]:
    """Equations 26 and 27: the time t* at which all prompts arrive, and each user's share b_n.

    Given are the seconds of each with the whole band, D_n / (W log2(1 + SNR_n)).
    """
    total = sum(seconds_alone)
    return total, [each / total for each in seconds_alone]
