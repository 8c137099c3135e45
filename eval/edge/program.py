"""What a batch costs both base stations in each step, and which prompts are to run together.

Equations 7 to 22 of the paper, and its algorithm 1. Knows numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eval.edge.network import Model, Network, Task

Array = npt.NDArray[np.float64]


class Plan(NamedTuple):
    """Batches in the order in which they run, and how many tokens each step drafts."""

    batches: tuple[tuple[Task, ...], ...]
    length: int
    expected: float  # Seconds, if every answer is as long as answers can be.


def tokens_per_step(length: int, acceptance: float) -> float:
    """Equation 7.

    >>> [round(tokens_per_step(length, 0.5), 3) for length in (0, 1, 2)]
    [1.0, 1.5, 1.75]
    """
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def flops(model: Model, new: Array | float, held: Array | float) -> Array:
    """What a forward of `new` tokens computes for a row with `held` keys and values (11 and 12)."""
    weights = 2.0 * model.num_weights * np.asarray(new)
    attention = 4.0 * model.num_layers * model.hidden_size
    return np.asarray(weights + attention * np.asarray(new) * (np.asarray(held) + new))


def stages(
    network: Network, num_rows: Array, inputs: Array, length: int, num_steps: int
) -> tuple[Array, Array]:
    """The seconds of drafting and of verifying (batches, steps), by equations 13, 14 and 17.

    `num_rows` and `inputs` are those of each batch. The first forward of each model reads the
    prompts.
    """
    draft, verify = network.models
    rows, inputs = num_rows[:, None], inputs[:, None]
    steps = np.arange(num_steps)[None, :]
    held = inputs + steps * tokens_per_step(length, network.acceptance)
    work = np.zeros(np.broadcast_shapes(held.shape, rows.shape))
    for number in range(length):
        is_first = (steps == 0) & (number == 0)
        one = np.where(is_first, flops(draft, inputs, 0.0), flops(draft, 1.0, held + number))
        work = work + one
    fixed, speed = _machine(network, draft, network.draft_gb_per_s, network.draft_tflops)
    drafting = length * fixed + rows * work / speed
    checked = np.where(
        steps == 0, flops(verify, inputs + length, 0.0), flops(verify, length + 1.0, held)
    )
    fixed, speed = _machine(network, verify, network.verify_gb_per_s, network.verify_tflops)
    return drafting, fixed + rows * checked / speed


def _machine(network: Network, model: Model, gb_per_s: float, tflops: float) -> tuple[float, float]:
    """The seconds of a forward whatever it computes, and the operations of a second."""
    reading = 2 * model.num_weights / (gb_per_s * 1e9) if network.reads_weights else 0.0
    return network.launch_ms / 1e3 + reading, tflops * 1e12


def pipeline(network: Network, batches: Sequence[Sequence[Task]], length: int) -> float:
    """The seconds of all steps if a batch is verified while the next one is drafted (20 to 22)."""
    drafting, verifying, steps = _of_batches(network, batches, length)
    drafted = np.zeros(steps)
    verified = np.zeros(steps)
    for draft, verify in zip(drafting, verifying, strict=True):
        drafted = drafted + draft
        # A batch that is done leaves the step as it was.
        verified = np.where(verify > 0, np.maximum(drafted, verified) + verify, verified)
    return float(verified.sum())


def turns(network: Network, batches: Sequence[Sequence[Task]], length: int) -> float:
    """The same without overlap."""
    drafting, verifying, _ = _of_batches(network, batches, length)
    return float(drafting.sum() + verifying.sum())


def _of_batches(
    network: Network, batches: Sequence[Sequence[Task]], length: int
) -> tuple[Array, Array, int]:
    """Both stages of each batch and step; a batch takes no time behind its longest answer."""
    per_step = tokens_per_step(length, network.acceptance)
    lasting = [math.ceil(max(task.output_length for task in own) / per_step) for own in batches]
    rows = np.array([float(len(own)) for own in batches])
    inputs = np.array([float(max(task.input_length for task in own)) for own in batches])
    drafting, verifying = stages(network, rows, inputs, length, max(lasting))
    active = np.arange(max(lasting)) < np.array(lasting)[:, None]
    return drafting * active, verifying * active, max(lasting)


def best_batches(network: Network, tasks: Sequence[Task], length: int) -> Plan:
    """Algorithm 1: sorted by input, split by the rule that keeps one boundary for each prompt.

    With j the end of the last batch but one, a batch that ends at n is drafted and verified in each
    step s at

        f1_s(n) = f1_s(j) + draft_s,    f2_s(n) = max(f1_s(n), f2_s(j)) + verify_s,

    and the boundary with the least sum of f2 stays. All answers count as the longest that there
    can be. The rule is not exact: a split with a greater sum may end earlier later on.
    """
    ordered = sorted(tasks)
    longest = network.output_tokens[1]
    num_steps = math.ceil(longest / tokens_per_step(length, network.acceptance))
    drafted, verified = np.zeros((2, len(ordered) + 1, num_steps))
    boundary = [0]
    for end in range(1, len(ordered) + 1):
        input_length = ordered[end - 1].input_length
        starts = [j for j in range(end) if network.fits(end - j, input_length)]
        rows = np.array([float(end - start) for start in starts])
        draft, verify = stages(
            network, rows, np.full(len(starts), float(input_length)), length, num_steps
        )
        first = drafted[starts] + draft
        second = np.maximum(first, verified[starts]) + verify
        best = int(second.sum(axis=1).argmin())
        drafted[end], verified[end] = first[best], second[best]
        boundary.append(starts[best])
    batches: list[tuple[Task, ...]] = []
    end = len(ordered)
    while end:
        batches.append(tuple(ordered[boundary[end] : end]))
        end = boundary[end]
    return Plan(tuple(reversed(batches)), length, float(verified[-1].sum()))
