"""What other programs and control groups leave of processor and memory."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from eval.runs import processor
from eval.runs.processor import LEAST_SHARE, num_processors, processor_share
from selfspec.machine.memory import free_memory


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
    monkeypatch.setattr(processor, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(processor, "process_time", lambda: processors * clock.now)
    monkeypatch.setattr(processor, "num_processors", lambda: processors)
    assert processor_share() >= LEAST_SHARE


# What Linux says of the groups of a process, and their files: 1.5 processors, 5,000 of 6,000 bytes.
# Of what is used, 4,900 bytes are files that need not stay in memory.
SECOND = {
    "cpu.max": "150000 100000",
    "memory.max": "6000\n",
    "memory.current": "5900\n",
    "memory.stat": (
        "anon 900\nfile_dirty 60\nfile_writeback 40\ninactive_file 3000\nactive_file 2000\n"
    ),
}
NO_LIMIT = {"cpu.max": "max 100000", "memory.max": "max\n", "memory.current": "1000\n"}
QUOTA = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}
LIMIT = {
    "memory.limit_in_bytes": "6000\n",
    "memory.usage_in_bytes": "5900\n",
    "memory.stat": (
        "inactive_file 1\nactive_file 1\ndirty 0\n"
        "total_dirty 100\ntotal_inactive_file 3000\ntotal_active_file 2000\n"
    ),
}
NO_STATISTICS = {"memory.limit_in_bytes": "6000\n", "memory.usage_in_bytes": "1000\n"}
GROUPS = {
    "second version": ("0::/a/b\n", {"a": SECOND, "a/b": NO_LIMIT}),
    "own root": ("0::/\n", {"": SECOND}),
    "first version": (
        "5:hugetlb,memory:/c/d\n4:cpu,cpuacct:/c\n",
        {"cpu/c": QUOTA, "memory/c": LIMIT},
    ),
    "a limit on the group above": (
        "0::/a/b\n",
        {"a": SECOND, "a/b": {"memory.max": "7000\n", "memory.current": "100\n"}},
    ),
    "a sandbox": ("5:memory:/\n4:cpu:/\n", {"cpu": QUOTA, "memory": NO_STATISTICS}),
}


@pytest.mark.parametrize("group", GROUPS)
def test_limits_of_control_groups_count(group: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(8), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    assert (num_processors(tmp_path), free_memory(root=tmp_path)) == (8, 9000)
    name, folders = GROUPS[group]
    for folder, files in {**folders, "../../../proc/self": {"cgroup": name}}.items():
        inside = tmp_path / "sys/fs/cgroup" / folder
        inside.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (inside / file).write_text(text)
    assert (num_processors(tmp_path), free_memory(root=tmp_path)) == (1.5, 5000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(1), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=500))
    assert (num_processors(tmp_path), free_memory(root=tmp_path)) == (1, 500)
