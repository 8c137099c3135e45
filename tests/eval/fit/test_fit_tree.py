"""The search for a fitted tree finds the best one of all, and the program's file can be used."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from eval.fit.accuracies import best_tree
from eval.papers import as_in
from selfspec import attach
from tests.tiny import make_tokenizer

PLACES = [path for depth in (1, 2, 3) for path in product((0, 1), repeat=depth)]
shares = st.sampled_from([0.0, 0.05, 0.3, 0.3, 0.6, 1.0])
# The rates of two candidates after each node of three levels.
by_place = st.fixed_dictionaries(
    {path: st.tuples(shares, shares) for path in [(), *PLACES] if len(path) < 3}
)


@settings(max_examples=25)
@given(by_place, st.integers(1, 5))
def test_adding_the_likeliest_next_equals_brute_force(places, num_nodes):
    def chance_of(path) -> float:
        return prod(places[path[:depth]][rank] for depth, rank in enumerate(path))

    def is_tree(paths) -> bool:
        return all(len(path) == 1 or path[:-1] in paths for path in paths)

    every = (set(paths) for n in range(num_nodes + 1) for paths in combinations(PLACES, n))
    best = max(sum(map(chance_of, paths)) for paths in every if is_tree(paths))
    tree = best_tree(lambda path: places.get(path, ()), num_nodes)
    found = [()]
    for parent, rank in tree.places():
        found.append((*found[parent], rank))
    assert len(set(found)) == tree.width <= num_nodes + 1
    assert tree.chances == pytest.approx([chance_of(path) for path in found[1:]])
    assert sum(tree.chances) == pytest.approx(best)


def test_the_program_makes_a_tree_that_drafts(told, asked, chat_folder, tmp_path, measuring):
    asked += ["--limit", "3", "--max-new-tokens", "24", "--width", "6"]
    asked += ["--out", str(tmp_path / "fitted")]
    status, lines, error = told("fit", *asked)
    assert status == 0, error
    assert any(line.endswith("kept") for line in lines)
    spec = as_in("ghidorah", tree=tmp_path / "fitted")
    model = attach(AutoModelForCausalLM.from_pretrained(chat_folder))
    ids = torch.tensor([make_tokenizer()("the fox 1")["input_ids"]])
    model.generate(ids, assistant=spec, max_new_tokens=24, do_sample=False)
    assert 1 < spec.stats.nodes_per_step <= 6
    assert "must not be there yet" in told("fit", *asked)[2]
