"""Trees keep their invariants and say so; statistics add up."""

import json
from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import given

from selfspec.records import DraftTree, Evidence, Laps, StepRecord
from selfspec.stats import GenerationStats
from tests.strategies import check_tree, tree_of, trees

LUT = Evidence("lut")
CONTEXT = Evidence("context", match_length=2)


@given(trees(alphabet=3))
def test_a_tree_built_by_add_holds_its_invariants(tree):
    check_tree(tree)


@pytest.mark.parametrize(
    ("path", "committed", "accepted"),
    [([0], [5], []), ([0, 1, 3], [5, 6, 7], [1, 3]), ([0, 1, 3], [5], [1])],
)
def test_accepted_nodes_are_those_whose_tokens_were_committed(path, committed, accepted):
    tree = tree_of([-1, 0, 0, 1])
    record = StepRecord(row=0, tree=tree, path=path, committed_ids=committed)
    assert record.accepted_nodes() == accepted
    assert record.num_accepted == len(accepted)


def step(*accepted: int) -> StepRecord:
    """A root with a LUT child and a child that both sources named, and one below that."""
    tree = DraftTree.of_root(1)
    tree.add(0, 2, 0.5, (LUT,))
    tree.add(0, 3, 0.4, (LUT, CONTEXT))
    tree.add(2, 4, 0.3, (CONTEXT,))
    committed = [*(tree.tokens[node] for node in accepted), 9]
    return StepRecord(row=0, tree=tree, path=[0, *accepted], committed_ids=committed)


def test_a_step_is_counted_exactly():
    stats = GenerationStats()
    stats.count_step(step(2, 3))
    stats.count_step(step())
    assert (stats.num_steps, stats.num_nodes, stats.num_new_tokens) == (2, 8, 4)
    assert stats.accepted_lengths == {2: 1, 0: 1}
    assert stats.drafted_by_source == {"lut": 4, "context": 4}
    assert stats.accepted_by_source == {"lut": 1, "context": 2}
    assert stats.tokens_per_step == 2.0
    assert stats.nodes_per_step == 4.0
    read = json.loads(json.dumps(stats.as_dict()))
    assert {field.name for field in fields(GenerationStats)} < read.keys()
    assert read["accepted_by_source"] == {"lut": 1, "context": 2}


def test_acceptance_is_counted_as_in_vllm():
    """Of steps with drafts: the tokens by position, and the step's own one as well."""
    stats = GenerationStats()
    for each in (step(2, 3), step(), step(1)):
        stats.count_step(each)
    stats.count_step(StepRecord(row=0, tree=DraftTree.of_root(1), path=[0], committed_ids=[9]))
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 3)
    assert stats.num_accepted_tokens_per_pos == [2, 1]
    assert (
        "  Mean acceptance length 2.00: 3 of 9 drafted tokens accepted, rate by position 0: 0.67, "
        "1: 0.33"
    ) in str(stats)
    assert stats.as_dict()["num_accepted_tokens_per_pos"] == [2, 1]
    assert "Mean" not in str(GenerationStats(num_new_tokens=4, num_steps=3, num_nodes=3))


LATEST = (
    "disabled_reason",
    "paused",
    "mode",
    "forward",
    "eager_reason",
    "heads_reason",
    "draft_model_reason",
    "draft_model_bytes",
    "kept_reason",
    "table_bytes",
    "packing_note",
    "captured_bytes",
)


def test_adding_leaves_out_no_field():
    stats = GenerationStats(
        **{
            field.name: 3 if field.type in ("int", "float") else Counter({"x": 3})
            for field in fields(GenerationStats)
            if field.name not in LATEST
        }
    )
    doubled = stats + stats
    for field in fields(GenerationStats):
        if field.name not in LATEST:
            assert getattr(doubled, field.name) in (6, Counter({"x": 6})), field.name
    with pytest.raises(TypeError):
        stats + 1


def test_it_says_how_many_calls_were_not_drafted():
    plain = GenerationStats(num_calls=1)
    plain.disable("no cache")
    total = GenerationStats(num_calls=99) + plain + GenerationStats(num_calls=1)
    assert "1 of 101 calls not drafted: no cache" in str(total)
    assert "\n  note: not drafted: no cache" in str(plain)


def laps(**seconds: float) -> Laps:
    """The stages of a step that took some seconds."""
    step_laps = Laps(lambda: 0.0)
    step_laps.seconds = seconds
    return step_laps


def test_it_says_whether_it_was_faster():
    stats = GenerationStats(num_calls=1)
    for _ in range(3):
        stats.count_step(step())
        stats.count_time(laps(forward=0.1), 1, 1)
    for _ in range(2):
        stats.count_step(step(2, 3))
        stats.count_time(laps(forward=0.15), 1, 4)
    assert stats.speed_up is None
    assert "is unknown: there were too few plain steps" in str(stats)
    stats.count_step(step())
    stats.count_time(laps(forward=0.1), 1, 1)
    assert stats.num_new_tokens == 10
    assert stats.speed_up == pytest.approx(10 * 0.1 / 0.7)
    assert "1.43x: 0.70 s for the steps, 1.00 s had all been plain" in str(stats)
    assert GenerationStats().speed_up is None


def test_a_row_has_its_share_of_a_step():
    row = GenerationStats()
    row.count_time(laps(forward=0.4), 4, 1)
    assert (row.num_plain_steps, row.plain_seconds, row.step_seconds) == (1, 0.1, 0.1)
    assert row.seconds == {"forward": 0.1}


@pytest.mark.parametrize("name", LATEST)
def test_of_what_is_not_summed_the_newer_one_wins(name):
    value = 3 if name.endswith("bytes") else "old"
    old, new = GenerationStats(**{name: value}), GenerationStats(**{name: value * 2})
    assert getattr(old + new, name) == value * 2
    assert getattr(old + GenerationStats(), name) == value


def test_the_report_names_what_was_counted():
    stats = GenerationStats(disabled_reason="no 4-D masks", seconds=Counter(forward=0.25))
    stats.count_step(step(2, 3))
    report = str(stats)
    for said in ("3 new tokens in 1 steps", "no 4-D masks", "lut 1 of 2", "forward 0.250"):
        assert said in report
    assert "accepted by source (a token may have several): context 2 of 2, lut 1 of 2\n" in report
    stats.drafted_by_source["context"] -= 1  # Now they add up to the three drafts.
    assert "accepted by source: context 2 of 1, lut 1 of 2\n" in str(stats)
    assert "  0.250 s with prompts: forward 0.250" in report
    assert str(GenerationStats(eager_reason="no graphs")).endswith("eager forwards: no graphs")
    packed = GenerationStats(forward="packed", packing_note="so it is", seconds=Counter(a=1.0))
    assert "  note: packed forwards; so it is\n" in str(packed)


def test_the_report_has_six_lines_at_most():
    values = {"int": 3, "float": 1.0, "str": "tree", "str | None": "a reason"}
    every = {each.name: values.get(each.type, Counter({1: 2})) for each in fields(GenerationStats)}
    sources = Counter({"lut": 5, "context": 4})
    every |= {"drafted_by_source": sources, "accepted_by_source": sources}
    assert len(str(GenerationStats(**every)).splitlines()) == 6
    assert len(str(GenerationStats()).splitlines()) == 1
