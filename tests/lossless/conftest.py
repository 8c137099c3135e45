"""What the losslessness matrix shares: what models can verify, and which of its cases are slow."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from selfspec import runner as run
from selfspec.ability.look import look_at
from selfspec.ability.probe import DraftSupport, probe
from tests.fakes import fake_trials
from tests.lossless.same import CALLS, Call

_OF_TRIALS = ("verdicts", "traps", "foreign")  # the ends of their modules' names


@pytest.fixture
def packs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer that can be packed is once that is asked for, whatever a clock would say."""
    fake_trials(monkeypatch)


_found: WeakKeyDictionary[Any, dict[Hashable, DraftSupport]] = WeakKeyDictionary()


@pytest.fixture(autouse=True)
def tried_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is tried once in each of its states, and not for each `SelfSpec` that a test makes.

    Not so in tests of what trials find.
    """

    def known(model: Any) -> DraftSupport:
        found, key = _found.setdefault(model, {}), (look_at(model).verdict_key, model.dtype)
        if key not in found:
            found[key] = probe(model)
        return found[key]

    if not request.module.__name__.endswith(_OF_TRIALS):
        monkeypatch.setattr(run, "probe", known)


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    """One row or three, greedy or sampling."""
    return request.param


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where transformers copies remote code to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# A test that has few cases tries each with one row and with three, and of many cases every other.
_FEW_CASES = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a case in turns, one row is tried or three where a test has more; the rest is slow."""
    tests: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.get_closest_marker("in_turns") and not item.get_closest_marker("slow"):
            test, _, case = item.nodeid.partition("[")
            tests[test][re.sub("1-greedy|3-sample", "", case)].append(item)
    for cases in tests.values():
        if len(cases) > _FEW_CASES:
            _take_turns(cases)


def _take_turns(cases: Mapping[str, list[pytest.Item]]) -> None:
    """Which of a case's items is kept is drawn by their name, so that all processes agree."""
    for either in cases.values():
        drawn = zlib.crc32(either[0].nodeid.encode())
        kept = drawn % len(either)
        for item in either[:kept] + either[kept + 1 :]:
            item.add_marker("slow")
        if drawn // 64 % 2:
            either[kept].add_marker("slow")
