"""What was learned since is told from what was known, and goes on top of what others learned."""

import numpy as np

from selfspec.draft.sources.lut2 import Lut2Source
from selfspec.records import TopK
from selfspec.store import news, on_top
from tests.caches import VOCAB_SIZE, contents, lut, lut2, rates

NOTHING = contents(tables={}, corpus=None, calibration=[])
KIND = [["lut", 0, 1, 0, 1]]


def held(tables=None, calibration=()):
    return contents(tables=tables or {}, corpus=None, calibration=list(calibration))


def rates_on_top(now, before, kept):
    learned = news(held(calibration=now), held(calibration=before))
    assert learned is not None
    return on_top(learned, held(calibration=before), held(calibration=kept), VOCAB_SIZE)[1]


class TestNews:
    def test_everything_is_new_at_first(self):
        learned = news(contents(), NOTHING)
        assert learned.calibration == rates()
        for source, arrays in contents().tables.items():
            for name, array in arrays.items():
                np.testing.assert_array_equal(learned.tables[source][name], array)

    def test_nothing_is_new_when_nothing_changed(self):
        assert news(contents(), contents()) is None
        assert news(NOTHING, NOTHING) is None

    def test_only_rows_that_are_new_or_other_than_before(self):
        before = {"lut": lut([1, 3, 9]), "lut2": lut2([(1, 4), (3, 1)])}
        now = {"lut": lut([0, 3, 9, 12]), "lut2": lut2([(1, 4), (3, 1)])}
        now["lut"]["ids"][1:3] = before["lut"]["ids"][1:3]
        now["lut"]["probabilities"][2, 3] = 0.5
        learned = news(held(now), held(before))
        assert learned.tables["lut"]["tokens"].tolist() == [0, 9, 12]
        assert set(learned.tables) == {"lut"}

    def test_only_rates_that_are_other_than_before(self):
        now = [rates()[0], [rates()[1][0], 2.0, 5.0]]
        assert news(held(calibration=now), held(calibration=rates())).calibration == [now[1]]


class TestTables:
    def test_the_newer_row_wins_and_all_others_stay(self):
        ours, theirs = lut([3, 5]), lut([1, 3, 9])
        ours["ids"] = ours["ids"] + 20
        learned = news(held({"lut": ours}), NOTHING)
        tables, _ = on_top(learned, NOTHING, held({"lut": theirs}), VOCAB_SIZE)
        assert tables["lut"]["tokens"].tolist() == [1, 3, 5, 9]
        together = [theirs["ids"][0], ours["ids"][0], ours["ids"][1], theirs["ids"][2]]
        np.testing.assert_array_equal(tables["lut"]["ids"], together)

    def test_a_table_that_this_process_does_not_use_stays(self):
        learned = news(held({"lut": lut()}), NOTHING)
        tables, _ = on_top(learned, NOTHING, held({"lut2": lut2()}), VOCAB_SIZE)
        np.testing.assert_array_equal(tables["lut2"]["pairs"], lut2()["pairs"])

    def test_a_narrower_table_of_ours_cuts_no_row_of_theirs(self):
        learned = news(held({"lut": lut([2], top_k=3)}), NOTHING)
        tables, _ = on_top(learned, NOTHING, held({"lut": lut([1], top_k=5)}), VOCAB_SIZE)
        np.testing.assert_array_equal(tables["lut"]["ids"][0], lut([1], top_k=5)["ids"][0])
        assert tables["lut"]["ids"].shape == (2, 5)

    def test_pairs_never_outgrow_the_table(self):
        """Two full tables of other pairs do not make one twice as large."""
        full = [self.full_table(first) for first in (0, 1000)]
        learned = news(held({"lut2": full[1]}), NOTHING)
        tables, _ = on_top(learned, NOTHING, held({"lut2": full[0]}), 2000)
        assert len(full[0]["pairs"]) > 70_000
        assert len(tables["lut2"]["pairs"]) <= 1 << 17
        mine = {tuple(pair) for pair in full[1]["pairs"].tolist()}
        assert mine <= {tuple(pair) for pair in tables["lut2"]["pairs"].tolist()}

    def full_table(self, first: int):
        source = Lut2Source(2000, 1)
        above, token = np.divmod(np.arange(150_000), 1000)
        pairs = np.stack([above + first, token], axis=-1)
        ids = np.zeros((len(pairs), 1), np.int32)
        source.observe_pairs(pairs, TopK(ids, np.ones(ids.shape, np.float16)))
        return source.arrays()


class TestRates:
    def test_ours_alone_are_kept_as_they_are(self):
        start, now = [KIND, 10.0, 20.0], [KIND, 11.5, 25.0]
        assert rates_on_top([now], [start], [start]) == [now]
        assert rates_on_top([now], [start], []) == [now]
        assert rates_on_top([now], [], []) == [now]

    def test_what_two_learned_from_nothing_adds_up(self):
        assert rates_on_top([[KIND, 6.0, 8.0]], [], [[KIND, 1.0, 8.0]]) == [[KIND, 7.0, 16.0]]

    def test_trials_that_both_started_from_count_once(self):
        start, ours, theirs = [KIND, 10.0, 20.0], [KIND, 20.0, 30.0], [KIND, 25.0, 50.0]
        [(_, hits, trials)] = rates_on_top([ours], [start], [theirs])
        assert trials == 60.0
        assert hits / trials == 45 / 80

    def test_two_that_saw_the_same_change_do_not_exaggerate_it(self):
        """Both had faded what they started from."""
        start, now = [KIND, 250.0, 500.0], [KIND, 400.0, 500.0]
        [(_, hits, trials)] = rates_on_top([now], [start], [[KIND, 400.0, 500.0]])
        assert (hits, trials) == (400.0, 500.0)

    def test_no_more_than_a_cache_keeps(self):
        many = [[[["lut", 0, rank, 0, 0]], 1.0, 4.0 + rank] for rank in range(1, 4000)]
        kept = rates_on_top(many, [], [])
        assert len(kept) == 2048
        assert min(trials for _, _, trials in kept) > 1900
