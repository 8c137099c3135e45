"""EdgeLLM's rules: whose turn it is, when drafting ends, and how the threshold moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from eval.methods.draft_rules import Counted, Fallback, Rule, drafted
from selfspec.records import DraftTree, Likely

CHANCES = (0.6, 0.2, 0.1)


class Counting:
    """Behind token n come n + 1, n + 2 and n + 3, however it was reached."""

    def __init__(self) -> None:
        self.num_looks = 0

    def extend(self, token_ids: Sequence[int]) -> Likely:
        return self.behind(token_ids[-1])

    def look(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[Likely]:
        self.num_looks += 1
        return [self.behind(token) for token in token_ids]

    def keep(self, path: Sequence[int]) -> None:
        assert path[0] == 0

    def behind(self, token: int) -> Likely:
        return [(token + step, chance) for step, chance in enumerate(CHANCES, 1)]


def decoded(text: list[int], rule: Rule) -> Counted:
    return drafted(Counting(), [1, 2], text, rule)


def test_best_first_has_the_largest_sum_of_path_products():
    """No other tree of so many nodes promises more, the pacer's neither."""
    paths = (path for depth in range(1, 7) for path in itertools.product(CHANCES, repeat=depth))
    products = sorted((_product(path) for path in paths), reverse=True)
    promised = {
        order: decoded([5, 99], Rule(6, order)).promised
        for order in ("chain", "best-first", "pacer")
    }
    assert promised["best-first"] == pytest.approx(sum(products[:6]))
    assert promised["pacer"] < promised["best-first"]
    assert promised["chain"] == pytest.approx(sum(0.6**depth for depth in range(1, 7)))


def _product(chances: Sequence[float]) -> float:
    product = 1.0
    for chance in chances:
        product *= chance
    return product


def test_a_text_is_decoded_whole():
    found = decoded([5, 6, 7, 9, 20, 21], Rule(3, "chain"))
    assert found.num_tokens == 5
    assert found.num_steps == 3  # 6, 7 and 9; 20; 21
    assert found.num_nodes == 9
    assert found.num_forwards == 9  # Two of three nodes are read, and what the model added.
    assert found.num_first == 2
    assert found.speed_up(0.5) == pytest.approx(5 / (3 + 0.5 * 9))


@pytest.mark.parametrize(("as_written", "num_nodes"), [(True, 3), (False, 2)])
def test_drafting_ends_after_the_confidence_fell_or_before_it(as_written, num_nodes):
    """The likeliest scores are 0.6, 0.36 and 0.216."""
    rule = Rule(64, fallback=Fallback(as_written, 0.3))
    assert decoded([5, 99], rule).num_nodes == num_nodes


def test_equation_3():
    tree = DraftTree.of_root(1)
    for node in range(4):
        tree.add(node, 2, 0.5 ** (node + 1))
    threshold = Fallback(True, 0.01)
    threshold.observe(tree, 4, 4)
    assert threshold.value == pytest.approx(0.005)
    threshold.observe(tree, 4, 3)
    assert threshold.value == pytest.approx(0.005 / (0.5**4) ** 0.25)
