"""Cards with anything in them: each is read, or refused as a card; nothing else comes out."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.errors import CacheError
from selfspec.store import load_cache, save_cache, verify_cache
from selfspec.store.card import checksum
from tests.caches import contents
from tests.strategies import any_json, damaged

FUZZ = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder, and the bytes of its card."""
    folder = tmp_path_factory.mktemp("fuzz") / "cache"
    save_cache(folder, contents())
    return folder, (folder / "cache.json").read_bytes()


def tried(whole: Any, card: bytes) -> None:
    folder, _ = whole
    (folder / "cache.json").write_bytes(card)
    for door in (load_cache, verify_cache):
        with suppress(CacheError):
            door(folder)


@FUZZ
@given(st.data())
def test_bytes_that_changed(whole, data):
    tried(whole, data.draw(damaged(whole[1])))


@FUZZ
@given(st.data())
def test_entries_that_changed(whole, data):
    """The checksum is right, as somebody would make it who means harm."""
    card = json.loads(whole[1])
    inside = data.draw(st.sampled_from([card, *(v for v in card.values() if isinstance(v, dict))]))
    inside[data.draw(st.sampled_from([*inside, "more"]))] = data.draw(any_json)
    with suppress(RecursionError):
        card["checksum"] = checksum(card)
    tried(whole, json.dumps(card).encode())
