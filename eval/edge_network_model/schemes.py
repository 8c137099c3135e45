"""The ways of serving the users of a cell that the paper compares, for the same users."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eval.edge_network_model.equations import Plan, Task, best_batches, seconds_of
from eval.edge_network_model.network import Network, User, shares_of_band, upload_seconds

PLANNED, UNIFORM = "planned", "uniform bandwidth"
DESCRIPTIONS = {
    PLANNED: "batches and draft length by algorithm 1, a pipeline, bandwidth by need",
    "no pipeline": "the same batches and draft length, drafted and verified in turns",
    "no batching": "the pipeline, one prompt at a time",
    "fixed length": "the pipeline, batches by algorithm 1 for one draft length",
    "no speculation": "the large model alone, batches by the heuristic",
    "static batches": "the pipeline, small batches of one size",
    "largest batch": "the pipeline, in each batch as many as fit in any case",
    "heuristic": "the pipeline, two equal batches, then more while that is faster",
    UNIFORM: "as planned, but each user has the same share of the band",
}


class Served(NamedTuple):
    """The seconds until all prompts have arrived, and then until all answers are complete."""

    upload: float
    inference: float

    @property
    def seconds(self) -> float:
        """From the first bit to the last token."""
        return self.upload + self.inference


Batches = Sequence[Sequence[Task]]


def serve(network: Network, users: Sequence[User]) -> dict[str, Served]:
    """What each scheme takes. Plans are made without a look at the answers' lengths.

    Where the paper's schemes do not sort prompts, they come in the order of the users.
    """
    network.check()
    tasks, stations = [user.task for user in users], network.stations
    lengths, longest = range(1, network.max_length + 1), max(tasks).input_length
    planned = _soonest(best_batches(stations, tasks, n) for n in lengths)
    largest = next(n for n in range(len(tasks), 0, -1) if stations.fits(n, longest))
    plans = {
        PLANNED: planned,
        "no pipeline": planned,
        "no batching": _with_best_length(network, _chunks(tasks, 1)),
        "fixed length": best_batches(stations, tasks, network.fixed_length),
        "no speculation": _heuristic(network, tasks, (0,)),
        "static batches": _with_best_length(network, _chunks(tasks, network.static_rows)),
        "largest batch": _with_best_length(network, _chunks(tasks, largest)),
        "heuristic": _heuristic(network, tasks, lengths),
    }
    hertz = network.bandwidth_mhz * 1e6
    least, _ = shares_of_band(users, hertz)
    served = {}
    for name, plan in plans.items():
        overlap = name != "no pipeline"
        seconds = seconds_of(stations, plan.batches, plan.length, overlap=overlap)
        served[name] = Served(least, seconds)
    equal = upload_seconds(users, [1 / len(users)] * len(users), hertz)
    return {**served, UNIFORM: served[PLANNED]._replace(upload=equal)}


def _soonest(plans: Iterable[Plan]) -> Plan:
    return min(plans, key=lambda plan: plan.expected)


def _chunks(tasks: Sequence[Task], size: int) -> Batches:
    return [tasks[start : start + size] for start in range(0, len(tasks), size)]


def _with_best_length(
    network: Network, batches: Batches, lengths: Iterable[int] | None = None
) -> Plan:
    """These batches, with the draft length that would be best if all answers were long."""
    most = network.output_tokens[1]
    long = [[task._replace(output_length=most) for task in batch] for batch in batches]
    frozen = tuple(map(tuple, batches))
    tried = lengths or range(1, network.max_length + 1)
    return _soonest(Plan(frozen, n, seconds_of(network.stations, long, n)) for n in tried)


def _heuristic(network: Network, tasks: Sequence[Task], lengths: Iterable[int]) -> Plan:
    """Two batches, then three and more, until the expected time rises."""
    best: Plan | None = None
    for number in range(min(2, len(tasks)), len(tasks) + 1):
        size = -(-len(tasks) // number)
        if not network.stations.fits(size, max(tasks).input_length):
            continue
        plan = _with_best_length(network, _chunks(tasks, size), lengths)
        if best is not None and plan.expected > best.expected:
            break
        best = plan
    assert best is not None, "one prompt at a time fits"
    return best
