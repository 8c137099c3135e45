"""How much of the processor other programs leave, of what this process may use."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from selfspec.machine import busy
from selfspec.machine.busy import LEAST_SHARE, num_processors, processor_share


def test_the_share_of_the_processor_is_one_at_most():
    assert 0 < processor_share() <= 1


@pytest.mark.parametrize("processors", [1, 0.5])
def test_a_quiet_machine_is_not_busy_because_we_may_not_use_all_of_it(processors, monkeypatch):
    """As with `taskset` or `docker --cpus`, where torch may still have a thread for each core."""
    clock = SimpleNamespace(now=0.0)

    def mm(*_matrices):
        clock.now += 0.01

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(busy, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(busy, "process_time", lambda: processors * clock.now)
    monkeypatch.setattr(busy, "num_processors", lambda: processors)
    assert processor_share() >= LEAST_SHARE


GROUPS = {
    "second version": ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}),
    "own root": ("0::/\n", {"cpu.max": "150000 100000\n"}),
    "first version": (
        "5:memory:/c\n4:cpu,cpuacct:/c\n",
        {"cpu/c/cpu.cfs_quota_us": "150000\n", "cpu/c/cpu.cfs_period_us": "100000\n"},
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_quotas_of_control_groups_count(group: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(8), raising=False)
    assert num_processors(tmp_path) == 8  # Nothing says more.
    name, files = GROUPS[group]
    for path, text in {f"sys/fs/cgroup/{k}": v for k, v in files.items()}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(name)
    assert num_processors(tmp_path) == 1.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(1), raising=False)
    assert num_processors(tmp_path) == 1
