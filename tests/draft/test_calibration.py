"""Rates start at the prior, go where the truth is, and fade."""

import json
import random
import threading
import time

import pytest

from selfspec.draft.calibration import Calibration, combine, prior
from selfspec.records import DraftTree, Evidence, Siblings, StepRecord

KIND = Evidence("lut", rank=2, probability_bin=1)
OTHER = Evidence("context", match_length=3)
RIGHT, WRONG = 7, 8


def record(hit: bool, *kinds: Evidence) -> StepRecord:
    """A root behind which a candidate of these kinds was looked at, and what the model said."""
    tree = DraftTree.of_root(1)
    tree.looked_at[0] = Siblings([RIGHT], [0.5], [kinds])
    return StepRecord(row=0, tree=tree, path=[0], committed_ids=[RIGHT if hit else WRONG])


def test_the_prior_reads_recorded_probabilities_and_match_lengths():
    by_bin = [prior(Evidence("lut", probability_bin=b)) for b in range(10)]
    assert by_bin == sorted(by_bin, reverse=True)
    assert by_bin[0] == 0.7
    by_length = [prior(Evidence("context", match_length=n)) for n in range(1, 9)]
    assert by_length == sorted(by_length)
    by_rank = [prior(Evidence("context", match_length=4, rank=r)) for r in range(1, 5)]
    assert by_rank == sorted(by_rank, reverse=True)
    assert all(0 < p < 1 for p in by_bin + by_length + by_rank)


def test_a_guess_follows_what_is_counted_of_its_parts():
    calibration, joint = Calibration(), (KIND, OTHER)
    assert calibration.probability(joint) == combine(map(prior, joint))
    calibration.observe(record(False, KIND))
    counted = calibration.probability((KIND,))
    assert counted < prior(KIND)
    assert calibration.probability(joint) == combine([counted, prior(OTHER)])
    assert calibration.copy().probability(joint) == combine([counted, prior(OTHER)])


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_rates_converge_to_the_truth(rate):
    calibration, dice = Calibration(), random.Random(1)
    trials = [dice.random() < rate for _ in range(3000)]
    for hit in trials:
        calibration.observe(record(hit, KIND))
    recent = sum(trials[-1000:]) / 1000
    assert calibration.probability((KIND,)) == pytest.approx(recent, abs=0.04)
    assert calibration.probability((OTHER,)) == prior(OTHER)


def test_old_trials_fade():
    calibration = Calibration()
    for _ in range(3000):
        calibration.observe(record(False, KIND))
    assert calibration.probability((KIND,)) < 0.01
    for _ in range(1000):
        calibration.observe(record(True, KIND))
    # without fading it would be 1000 / 4000
    assert calibration.probability((KIND,)) > 0.8


def test_joint_evidence_is_counted_as_a_kind_of_its_own():
    """What two sources know is not independent: how far they reinforce each other is counted."""
    calibration = Calibration()
    for turn in range(3000):
        calibration.observe(record(turn % 2 == 0, KIND, OTHER))
    assert calibration.probability((KIND, OTHER)) == pytest.approx(0.5, abs=0.02)
    assert calibration.probability((KIND,)) == prior(KIND)
    assert calibration.probability((OTHER,)) == prior(OTHER)


def test_only_what_stands_below_accepted_nodes_counts():
    """Below a rejected node nobody knows the truth; a leaf was never looked behind."""
    tree = DraftTree.of_root(1)
    accepted, rejected = tree.add(0, 2, 0.5), tree.add(0, 3, 0.4)
    leaf = tree.add(accepted, 4, 0.3)
    kinds = [Evidence("lut", rank=rank) for rank in range(1, 5)]
    tree.looked_at[0] = Siblings([2, 3], [0.5, 0.4], [(kinds[0],), (kinds[1],)])
    tree.looked_at[accepted] = Siblings([4], [0.6], [(kinds[2],)])
    tree.looked_at[rejected] = Siblings([5], [0.6], [(kinds[3],)])
    calibration = Calibration()
    path = [0, accepted, leaf]
    calibration.observe(StepRecord(row=0, tree=tree, path=path, committed_ids=[2, 4, 9]))
    rates = [calibration.probability((kind,)) for kind in kinds]
    assert rates[0] > prior(kinds[0])
    assert rates[1] < prior(kinds[1])
    assert rates[2] > prior(kinds[2])
    assert rates[3] == prior(kinds[3])


def test_a_copy_is_independent():
    calibration = Calibration()
    calibration.observe(record(True, KIND))
    before = calibration.probability((KIND,))
    twin = calibration.copy()
    assert twin.probability((KIND,)) == before
    twin.observe(record(False, KIND))
    assert calibration.probability((KIND,)) == before > twin.probability((KIND,))


class YieldingRates(dict):
    """Lets the other thread run between reading a rate and writing it back."""

    def get(self, key, default=None):
        rate = super().get(key, default)
        time.sleep(0)
        return rate


def test_rates_come_back_as_they_were():
    calibration, twin = Calibration(), Calibration()
    for turn in range(30):
        calibration.observe(record(turn % 3 == 0, KIND))
        calibration.observe(record(turn % 4 == 0, KIND, OTHER))
    rows = calibration.rows()
    twin.restore(json.loads(json.dumps(rows)))
    assert twin.rows() == rows
    for kinds in ((KIND,), (KIND, OTHER), (OTHER,)):
        assert twin.probability(kinds) == calibration.probability(kinds)
    twin.observe(record(True, KIND))
    assert twin.probability((KIND,)) > calibration.probability((KIND,))


def test_two_threads_lose_no_trial():
    """Equal trials may come in any order: the rate must be that of one thread doing it all."""
    steps = 200
    together, alone = Calibration(), Calibration()
    together._rates = YieldingRates()
    for _ in range(2 * steps):
        alone.observe(record(True, KIND))

    def work() -> None:
        for _ in range(steps):
            together.observe(record(True, KIND))
            together.copy()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together.probability((KIND,)) == alone.probability((KIND,))
