"""Growth equals brute force: every path scored, the best taken."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.config import SpecConfig
from selfspec.cost import CostCurve, MeasuredBudget
from selfspec.draft.ranking import Ranking
from selfspec.draft.shape import Shape
from selfspec.draft.tree import TreeGrower
from selfspec.papers.diaa import DynamicTree
from selfspec.records import DraftTree, StepRecord
from tests.oracles import GrowthOracle
from tests.strategies import ScriptedCursor, check_tree, probability_of, tables

configs = st.builds(SpecConfig, max_depth=st.integers(1, 4), top_k=st.integers(1, 4))
shapes = st.builds(
    DynamicTree,
    delta=st.sampled_from([1.0, 0.8, 0.3]),
    alpha=st.sampled_from([1.0, 0.7, 0.2]),
    tau=st.sampled_from([0.0, 0.005, 0.1, 0.5]),
)
EVEN = {"delta": 1.0, "alpha": 1.0, "tau": 0.0}


def grower(*cursors: ScriptedCursor, shape: Shape | None = None, **knobs) -> TreeGrower:
    return TreeGrower(cursors, SpecConfig(**knobs), Ranking(probability_of), shape and shape.grow)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from below the root down to each node, in the order they were added."""
    paths = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths[1:]


def oracle_of(
    cursors: list[ScriptedCursor], config: SpecConfig, shape: DynamicTree
) -> GrowthOracle:
    return GrowthOracle(
        tables=[cursor.table for cursor in cursors],
        follows=[cursor.follows for cursor in cursors],
        max_depth=config.max_depth,
        top_k=1 if config.top_k == 1 else 99,  # 1 asks for chains; the sources limit the rest
        depth_decay=shape.delta,
        width_decay=shape.alpha,
        threshold=shape.tau,
    )


@settings(max_examples=120)
@given(
    st.lists(st.builds(ScriptedCursor, tables(), follows=st.booleans()), max_size=3),
    configs,
    shapes,
    st.integers(1, 14),
    st.just(1.0) | st.floats(0.01, 1.0),
)
def test_a_tree_has_as_many_good_paths_as_it_may(cursors, config, shape, max_nodes, hope):
    """The best of all, exactly, where every node is hoped to have a child as good as itself."""
    with mock.patch("selfspec.draft.tree._LEAST_HOPE", hope):
        tree = TreeGrower(cursors, config, Ranking(probability_of), shape.grow).grow(0, max_nodes)
    check_tree(tree)
    everything, paths = oracle_of(cursors, config, shape).paths(0), paths_of(tree)
    best = everything[: max_nodes - 1]
    assert len(set(paths)) == len(paths) == len(best)
    if hope == 1.0:
        assert tree.scores[1:] == pytest.approx([path.score for path in best])
        assert tree.scores[1:] == sorted(tree.scores[1:], reverse=True)
    scores = {path.tokens: path.score for path in everything}
    assert tree.scores[1:] == pytest.approx([scores[path] for path in paths])
    for node, children in enumerate(tree.children):  # of siblings the best ones
        tokens = [tree.tokens[child] for child in sorted(children.values())]
        siblings = tree.looked_at[node]
        assert tokens == ([] if siblings is None else siblings.tokens[: len(tokens)])


def test_a_worked_example_with_the_papers_parameters():
    """B = 6, δ = 0.8, α = 0.7, τ = 5e-3; B counts the root.

    ::

        0 ── 1  .6                                = .6     first taken
        │    ├── 3  .6 · .5 · .8                  = .24    second
        │    │   └── 6  .24 · .02 · .8            = .00384 under τ: discarded
        │    └── 4  .6 · .4 · .7 · .8             = .1344  fourth
        ├── 2  .3 · .7                            = .21    third
        │    └── 5  .21 · .025 · .8               = .0042  under τ: discarded, although...
        └── 7  .005 · .7²                         = .00245 ...this scores less: the first level
                                                           is exempt, so it is the fifth
    """
    table = {
        0: [(1, 0.6), (2, 0.3), (7, 0.005)],
        1: [(3, 0.5), (4, 0.4)],
        2: [(5, 0.025)],
        3: [(6, 0.02)],
    }
    paper = {"shape": DynamicTree(delta=0.8, alpha=0.7, tau=5e-3)}
    tree = grower(ScriptedCursor(table), **paper).grow(0, 6)
    assert paths_of(tree) == [(1,), (1, 3), (2,), (1, 4), (7,)]
    assert tree.scores[1:] == pytest.approx([0.6, 0.24, 0.21, 0.1344, 0.00245])
    # nothing else is left, however many may be had
    assert len(grower(ScriptedCursor(table), **paper).grow(0, 60)) == 6
    # and with a smaller budget the least is left out
    assert paths_of(grower(ScriptedCursor(table), **paper).grow(0, 3)) == [(1,), (1, 3)]


def test_joint_evidence_is_in_the_order_of_the_sources():
    """Whoever named the nodes above: else it would be counted under several keys."""
    follows = ScriptedCursor({0: [(1, 0.5)], 2: [(3, 0.5)]}, follows=True, name="follows")
    names = ScriptedCursor({0: [(2, 0.5), (1, 0.3)], 2: [(3, 0.5)]}, name="names")
    tree = grower(follows, names).grow(0, 4)
    joint = [tree.evidence[paths_of(tree).index(path) + 1] for path in [(1,), (2, 3)]]
    for kinds in joint:
        assert [kind.source for kind in kinds] == ["follows", "names"]


def test_no_source_and_no_budget_mean_plain_decoding():
    assert len(grower().grow(0, 16)) == 1
    cursor = ScriptedCursor({0: [(1, 0.9)]})
    assert len(grower(cursor).grow(0, 1)) == 1
    assert cursor.num_expanded == 0


def told(tree: DraftTree, token: int) -> StepRecord:
    return StepRecord(row=0, tree=tree, path=[0], committed_ids=[token])


def test_an_interval_keeps_the_shape_and_refills_its_tokens():
    """One step grows, two refill the same places with what the cursor says by then."""
    table = {0: [(1, 0.9), (2, 0.1)], 1: [(3, 0.9)], 5: [(6, 0.4), (7, 0.3)], 6: [(8, 0.1)]}
    cursor = ScriptedCursor(table)
    trees = grower(cursor, shape=DynamicTree(**{**EVEN, "tau": 0.05}, interval=3))
    first = trees.grow(0, 4)
    assert paths_of(first) == [(1,), (1, 3), (2,)]
    for _ in range(2):
        cursor.observe(told(first, 5))
        refilled = trees.grow(5, 4)
        check_tree(refilled)
        assert refilled.parents == first.parents
        assert paths_of(refilled) == [(6,), (6, 8), (7,)]  # as the first, and not 6, 7, 8
        assert refilled.scores[1:] == pytest.approx([0.4, 0.04, 0.3])
    anew = trees.grow(5, 4)
    assert paths_of(anew) == [(6,), (7,)]  # grown by score again: (6, 8) is under τ


def test_a_step_may_allow_less_depth_than_the_config():
    chain = {last: [(last + 1, 0.9)] for last in range(8)}
    trees = grower(ScriptedCursor(chain), shape=DynamicTree(**EVEN, interval=9))
    assert paths_of(trees.grow(0, 9, 2)) == [(1,), (1, 2)]
    assert paths_of(trees.grow(0, 9, 1)) == [(1,)]  # the same shape, cut
    assert len(trees.grow(0, 9, 0)) == 1
    shallow = grower(ScriptedCursor(chain), max_depth=3)
    assert max(shallow.grow(0, 9, 5).depths) == 3


def test_growth_ends_where_the_next_node_does_not_pay():
    chain = {last: [(last + 1, 0.5)] for last in range(8)}
    asked = []

    def pays(tree: DraftTree, score: float) -> bool:
        assert len(tree) == len(asked) + 1
        asked.append(score)
        return score > 0.2

    tree = grower(ScriptedCursor(chain)).grow(0, 9, pays=pays)
    assert paths_of(tree) == [(1,), (1, 2)]
    assert asked == [0.5, 0.25, 0.125]


def test_a_kept_shape_ends_where_the_next_node_does_not_pay():
    """One row of a measured budget takes the width at which its tree ended."""
    cursor = ScriptedCursor({0: [(1, 0.9), (2, 0.8)], 1: [(3, 0.9)]})
    trees = grower(cursor, shape=DynamicTree(**EVEN, interval=5))
    trees.grow(0, 4)
    step = MeasuredBudget(CostCurve({1: 1.0, 4: 1.1})).step(4)
    tree = trees.grow(0, 4, pays=step.search())
    step.fit([tree])
    assert paths_of(tree) == [(1,), (1, 3), (2,)]


def test_ids_that_the_model_cant_read_become_no_nodes():
    cursor = ScriptedCursor({0: [(9, 0.9), (1, 0.8), (-200, 0.7)], 1: [(9, 0.9)]})
    trees = TreeGrower([cursor], SpecConfig(), Ranking(probability_of, num_ids=9))
    assert paths_of(trees.grow(0, 9)) == [(1,)]
    assert trees.add(0, 9) is None
    assert trees.add(0, 8) == 2


def test_no_draft_is_a_pad_or_follows_one():
    cursor = ScriptedCursor({0: [(5, 0.9), (6, 0.8)], 6: [(5, 0.9)]})
    trees = TreeGrower([cursor], SpecConfig(), Ranking(probability_of, banned=5))
    assert paths_of(trees.grow(0, 8)) == [(6,)]
    assert trees.grow(5, 8).tokens == [5]


class Ways(Shape):
    """Grows by several of the grower's ways, one after the other."""

    def __init__(self, ways: list) -> None:
        self._ways = ways

    def grow(self, grower: TreeGrower) -> None:
        for way in self._ways:
            way(grower)


ways = st.one_of(
    st.integers(1, 9).map(lambda most: lambda grower: grower.best_first(max_nodes=most)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=5).map(
        lambda places: lambda grower: grower.fill(places)
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda new: lambda grower: grower.add(new[0] % len(grower.tree), new[1])
    ),
)


@given(tables(), configs, st.lists(ways, max_size=4), st.integers(1, 9))
def test_the_ways_to_grow_may_follow_one_another(table, config, several, max_nodes):
    cursor = ScriptedCursor(table)
    trees = TreeGrower([cursor], config, Ranking(probability_of), Ways(several).grow)
    tree = trees.grow(0, max_nodes)
    check_tree(tree)
    assert len(tree) <= max_nodes
    assert cursor.num_expanded == sum(siblings is not None for siblings in tree.looked_at)
    if config.top_k == 1:
        assert all(len(children) <= 1 for children in tree.children)
    for num_nodes in range(len(tree), 0, -1):
        tree.cut(num_nodes)
        check_tree(tree)


def test_best_first_goes_on_below_what_was_filled():
    table = {0: [(1, 0.9), (2, 0.5)], 1: [(3, 0.9)], 3: [(4, 0.9)]}
    for places, added in (([(0, 0)], [(1, 3), (1, 3, 4), (2,)]), ([(0, 1)], [(1,), (1, 3)])):
        shape = Ways([lambda grower, places=places: grower.fill(places), TreeGrower.best_first])
        tree = grower(ScriptedCursor(table), shape=shape).grow(0, 5 if places[0][1] == 0 else 4)
        assert paths_of(tree)[1:] == added
