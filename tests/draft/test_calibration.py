"""Rates start at the prior, go where the truth is, and fade."""

import json
import random
import time

import pytest

from selfspec.draft import calibration as module
from selfspec.draft.calibration import Calibration, prior
from selfspec.records import DraftTree, Evidence, Siblings, StepRecord
from tests.lossless.same import in_threads

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
    assert calibration.probability(joint) == max(map(prior, joint))
    calibration.observe(record(False, OTHER))
    counted = calibration.probability((OTHER,))
    assert prior(KIND) < counted < prior(OTHER)
    twin = calibration.copy()
    assert twin.probability(joint) == counted
    twin.observe(record(False, OTHER))
    assert calibration.probability((OTHER,)) == counted > twin.probability((OTHER,))


@pytest.mark.parametrize("kinds", [(KIND,), (KIND, OTHER)], ids=["one source", "two"])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_rates_converge_to_the_truth(rate, kinds):
    """What two sources know together is counted as a kind of its own."""
    calibration, dice = Calibration(), random.Random(1)
    trials = [dice.random() < rate for _ in range(3000)]
    for hit in trials:
        calibration.observe(record(hit, *kinds))
    recent = sum(trials[-1000:]) / 1000
    assert calibration.probability(kinds) == pytest.approx(recent, abs=0.04)
    assert calibration.probability((OTHER,)) == prior(OTHER)


def test_old_trials_fade():
    calibration = Calibration()
    for hit, num_trials in ((False, 3000), (True, 1000)):
        for _ in range(num_trials):
            calibration.observe(record(hit, KIND))
    assert calibration.probability((KIND,)) > 0.8  # Without fading it would be 1000 / 4000.


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
    moved = [calibration.probability((kind,)) - prior(kind) for kind in kinds]
    assert moved[1] < 0 == moved[3] < min(moved[0], moved[2])


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


class YieldingRates(dict):
    """Lets the other thread run between reading a rate and writing it back."""

    def get(self, key, default=None):
        rate = super().get(key, default)
        time.sleep(0)
        return rate


def test_two_threads_lose_no_trial():
    """Equal trials may come in any order: the rate must be that of one thread doing it all."""
    together, alone = Calibration(), Calibration()
    together._rates = YieldingRates()
    for _ in range(400):
        alone.observe(record(True, KIND))
    in_threads(lambda _: together.observe(record(True, KIND)), 400, 2)
    assert together.probability((KIND,)) == alone.probability((KIND,))


def test_memory_is_bounded(monkeypatch):
    """A server meets new kinds of evidence for as long as it runs."""
    monkeypatch.setattr(module, "_MAX_ROWS", 4)
    monkeypatch.setattr(module, "_MOST_ROWS", 16)
    calibration = Calibration()
    for _ in range(20):
        calibration.observe(record(True, KIND))
    chance = calibration.probability((KIND,))
    for number in range(500):
        calibration.observe(record(False, Evidence("lut", count_bin=number + 100), OTHER))
        assert len(calibration._rates) <= 17
        assert len(calibration._chances) <= 3 * 17
    assert calibration.probability((KIND,)) == chance
    calibration.restore([[[list(Evidence("text", count_bin=n))], 1.0, 5.0] for n in range(40)])
    assert len(calibration._rates) <= 16
