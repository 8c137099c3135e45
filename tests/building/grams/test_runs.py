"""Merged runs are the sorted sum of all; a run that is not whole is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.building.grams.keys import Counted, add_up
from selfspec.building.grams.runs import Run, merged, write_run

grams = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 5, 2**63, 2**64 - 1])))


def counted(rows):
    return add_up(np.array(rows, np.uint64).reshape(-1, 2).T)


def rows_of(block):
    return list(zip(map(tuple, block.words.T.tolist()), block.counts.tolist(), strict=True))


@settings(deadline=None)
@given(st.lists(grams, max_size=5), st.integers(1, 12), st.sampled_from([2, 64]))
def test_merged_runs_are_the_sorted_sum(tmp_path_factory, lists, max_rows, fan_in):
    folder = tmp_path_factory.mktemp("runs")
    for index, rows in enumerate(lists):
        write_run(folder / f"{index}.run", [counted(rows)])
    runs = [Run(folder / f"{index}.run", 2) for index in range(len(lists))]
    scratch = folder / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.building.grams.runs._FAN_IN", fan_in)
        blocks = list(merged(runs, 2, max_rows, scratch))
    everything = [row for rows in lists for row in rows]
    assert [row for block in blocks for row in rows_of(block)] == rows_of(counted(everything))
    assert all(len(block.counts) <= max(max_rows, len(runs)) for block in blocks)
    assert all(run.num_read == run.num_grams for run in runs)


def test_a_run_comes_back_in_parts(tmp_path):
    block = counted([(i, i) for i in range(10)])
    write_run(tmp_path / "a.run", [Counted(block.words[:, :4], block.counts[:4])] * 2)
    run = Run(tmp_path / "a.run", 2)
    assert run.num_grams == 8
    assert rows_of(run.read(3, 2)) == [((3, 3), 1), ((0, 0), 1)]
    assert len(run.read(6, 100).counts) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.run"]


@pytest.mark.parametrize("kept", [0, 7, 8, 24, 31, 32, 48, 55])
def test_a_run_that_is_not_whole_is_refused(tmp_path, kept):
    path = tmp_path / "a.run"
    write_run(path, [counted([(1, 2), (3, 4)])])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"a\.run must be a whole run .* \(got {kept} bytes\)"):
        Run(path, 2)
