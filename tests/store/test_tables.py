"""Of tables only shapes are looked at when they are opened; `verify_cache` reads them all."""

import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from selfspec.errors import CacheCardError
from selfspec.store import load_cache, save_cache, verify_cache
from tests.caches import bless, contents, edit_card, lut, lut2


def problems(folder) -> list[str]:
    load_cache(folder)  # opens: nothing tells it apart from a good one
    return [str(problem) for problem in verify_cache(folder).values() if problem]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"lut": lut([3, 1, 9])}, "keys of lut must be sorted, none twice"),
        ({"lut": lut([1, 1, 9])}, "keys of lut must be sorted, none twice"),
        ({"lut": lut([-1, 1, 9])}, r"keys of lut must be in \[0, 12\)"),
        ({"lut2": lut2([(3, 1), (1, 4)])}, "keys of lut2 must be sorted, none twice"),
        ({"lut2": lut2([(1, 4), (1, 4)])}, "keys of lut2 must be sorted, none twice"),
        ({"lut": {**lut(), "ids": lut()["ids"] - 2}}, r"ids of lut must be in \[-1, "),
    ],
)
def test_luts(tmp_path, tables, said):
    save_cache(tmp_path / "cache", contents(tables=tables))
    edit_card(tmp_path / "cache", lambda card: card.update(num_ids=12))
    [problem] = problems(tmp_path / "cache")
    assert re.search(said, problem)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("token.1", lambda a: a[::-1], "token.1 must be sorted below each parent"),
        (
            "token.2",
            lambda a: np.r_[a[1], a[0], a[2:]],
            "token.2 must be sorted below each parent",
        ),
        ("token.1", lambda a: a + 20, "token.1 must be below 12"),
        ("next_token.2", lambda a: a + 20, "next_token.2 must be below 12"),
        ("next_count.1", lambda a: a * 0, "next_count.1 must be >= 1"),
        ("next_count.1", lambda a: a[::-1], "next_token.1 must have the most frequent first"),
        ("total.1", lambda a: a * 0, "total.1 must cover the counts"),
        ("next.1", lambda a: np.r_[a[0], a[1:-1][::-1], a[-1]], "next.1 must rise from 0"),
        ("child.1", lambda a: np.r_[a[0], a[1:-1][::-1], a[-1]], "child.1 must rise from 0"),
    ],
)
def test_corpus(folder, name, change, said):
    arrays = load_file(folder / "corpus.safetensors")
    arrays[name] = np.ascontiguousarray(change(arrays[name]).astype(arrays[name].dtype))
    save_file(arrays, folder / "corpus.safetensors")
    bless(folder, "corpus.safetensors")
    [problem] = problems(folder)
    assert said in problem


@pytest.mark.parametrize("change", [{"num_ids": 40}, {"top_k": 3}, {"counts": {}}])
def test_a_card_that_says_something_else(folder, change):
    edit_card(folder, lambda card: card.update(change))
    *others, (name, problem) = verify_cache(folder).items()
    assert not any(problem for _, problem in others)
    assert (name, type(problem)) == ("cache.json", CacheCardError)
