"""vLLM's drafts with a played engine: rows that come, go, wait, swap places and come back."""

from __future__ import annotations

import sys
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from selfspec.cache import Remembered, save_cache
from selfspec.cache.contents import CacheContents, tokenizer_info
from selfspec.cache.file import read_cache
from selfspec.draft.learned import Learned
from selfspec.engines import vllm
from selfspec.engines.chains import Chains, windows
from selfspec.engines.vllm import Proposer, config
from selfspec.errors import CacheError, ConfigError
from tests.caches import VOCAB_SIZE, FakeTokenizer, count_grams, learn, new_memory
from tests.waiting import wait_until

MAX_LENGTH = 64
LOOP = [3, 1, 4, 1, 5, 9, 2, 6]


def proposer(*, rank: int = 0, max_length: int = MAX_LENGTH, **options: Any) -> Proposer:
    """One as vLLM makes it, out of what `config` says."""
    asked = config(**options)
    model = SimpleNamespace(
        max_model_len=max_length,
        get_vocab_size=lambda: VOCAB_SIZE,
        tokenizer="owner/toy",
        tokenizer_revision=None,
        trust_remote_code=False,
    )
    return Proposer(
        SimpleNamespace(
            additional_config=asked["additional_config"],
            speculative_config=SimpleNamespace(**asked["speculative_config"]),
            model_config=model,
            parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
        )
    )


class Engine:
    """vLLM's side. A row writes a text that is known beforehand; `None` is a row still reading."""

    def __init__(self, proposer: Proposer, max_length: int = MAX_LENGTH) -> None:
        self.proposer = proposer
        self.rows: list[Row] = []
        self.max_length = max_length

    def add(self, prompt: list[int], answer: list[int], *, reads_for: int = 0) -> Row:
        row = Row(prompt, answer, reads_for)
        self.rows.append(row)
        return row

    def step(self, *, proposes: bool = True) -> None:
        """Verifies each row's drafts, writes what was sampled, and asks for new drafts."""
        sampled = [row.verify() for row in self.rows]
        ids = np.full((len(self.rows) + 2, self.max_length), -7, np.int32)  # What is free is junk.
        lengths = np.zeros(len(self.rows) + 2, np.int32)
        for place, row in enumerate(self.rows):
            lengths[place] = len(row.text)
            ids[place, : len(row.text)] = row.text
        drafts = [[] for _ in self.rows]
        if proposes:
            drafts = self.proposer.propose(sampled, lengths, ids, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        for row, new_ids, draft in zip(self.rows, sampled, drafts, strict=True):
            assert not draft or new_ids
            assert not draft or len(row.text) + len(draft) < self.max_length
            assert all(type(token) is int for token in draft)
            row.draft = draft


def opened_by_generate(path: Any) -> tuple[Remembered, Learned]:
    """What a `SelfSpec` does at its first call with `remember`."""
    remembered, memory = Remembered(path, FakeTokenizer(), saves=True), new_memory()
    remembered.open(memory, VOCAB_SIZE)
    return remembered, memory


class Row:
    def __init__(self, prompt: list[int], answer: list[int], reads_for: int = 0) -> None:
        self.text, self.answer, self.reads_for = list(prompt), answer, reads_for
        self.draft: list[int] = []
        self.num_steps = 0
        self.num_written = 0
        self.has_written = False  # in the last step

    @property
    def is_done(self) -> bool:
        return self.num_written == len(self.answer)

    def verify(self) -> list[int]:
        """The accepted drafts and one token more; nothing while the prompt is read."""
        self.has_written = not self.reads_for
        if self.reads_for:
            self.reads_for -= 1
            return []
        left, num_right = self.answer[self.num_written :], 0
        for draft, token in zip(self.draft, left[:-1], strict=False):
            if draft != token:
                break
            num_right += 1
        new_ids = left[: num_right + 1]
        self.text += new_ids
        self.num_written += len(new_ids)
        self.num_steps += 1
        return new_ids


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that were read from their beginning."""
    lengths = []
    plain = Chains.read

    def read(self: Chains, text: Any, serial: int = 0) -> None:
        lengths.extend([len(text)] if serial else [])
        plain(self, text, serial)

    monkeypatch.setattr(Chains, "read", read)
    return lengths


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_tokenizer", lambda model: FakeTokenizer())


def test_a_text_that_repeats_itself_is_drafted_for():
    engine = Engine(proposer(tokens=5))
    row = engine.add(LOOP, LOOP * 4)
    while not row.is_done:
        engine.step()
        assert len(row.draft) <= 5
    assert row.num_steps < 16


def test_the_next_prompt_of_a_conversation_is_no_answer(tmp_path):
    asked = proposer(remember=str(tmp_path / "learned"))
    engine = Engine(asked)
    row = engine.add([40], LOOP * 2)
    while not row.is_done:
        engine.step()
    engine.rows = []
    engine.add([*row.text, 45, 46, 47, 48, 49], LOOP)
    engine.step()
    assert not {45, 49} & set(asked._memory._answers.arrays()["tokens"].tolist())


def test_rows_that_ended_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "_MAX_SESSIONS", 9)
    asked = proposer()
    engine = Engine(asked)
    for first in range(20):
        engine.rows = []
        engine.add([first, *LOOP], LOOP)
        engine.step()
    assert len(asked._sessions) == 9


def test_a_long_row_is_read_once_also_where_rows_swap_places(opened: list[int]):
    max_length = 31_000
    engine = Engine(proposer(max_length=max_length), max_length)
    prompt = (np.arange(30_000) ** 2 % VOCAB_SIZE).tolist()
    row = engine.add(prompt, prompt[-100:])
    engine.add(LOOP, LOOP * 4)
    for _ in range(4):
        engine.step()
        engine.rows.reverse()
    assert sorted(opened) == [len(LOOP), 30_000]
    assert row.num_written > 4


def test_drafts_end_where_the_model_does():
    engine = Engine(proposer(max_length=30), 30)
    row = engine.add(LOOP, LOOP * 3)
    while len(row.text) < 29:  # The engine asserts that each draft leaves room.
        engine.step()


def test_of_a_text_that_nobody_can_guess_less_is_drafted_the_surer_it_must_be():
    num_drafts = []
    for least_chance in (0.0, 0.3):
        engine = Engine(proposer(least_chance=least_chance, max_length=400), 400)
        row = engine.add([7], Random(0).choices(range(20), k=300))
        drafts = []
        while not row.is_done:
            engine.step()
            drafts.append(len(row.draft))
        num_drafts.append(sum(drafts) / row.num_steps)
    assert num_drafts[1] < 1.5 < num_drafts[0]


def test_what_one_row_writes_is_drafted_for_the_next():
    engine = Engine(proposer())
    first = engine.add([40], LOOP * 2)
    while not first.is_done:
        engine.step()
    engine.rows = [Row([3], LOOP[1:])]
    engine.step()
    assert engine.rows[0].draft[:1] == [4]


class TestWhatLasts:
    def test_is_saved_and_drafted_from(self, tmp_path):
        path = tmp_path / "learned"
        first = proposer(remember=str(path))
        engine = Engine(first)
        row = engine.add([40], LOOP * 2)
        while not row.is_done:
            engine.step()
        first._memory.save()
        kept = read_cache(path.with_suffix(".safetensors"), tokenizer_info(FakeTokenizer()))
        assert [3, 1] in kept.tables["lut2"]["pairs"].tolist()
        assert kept.answers.tolist() == [*LOOP * 2, -1]
        for asked in (proposer(remember=str(path)), proposer(cache=str(path))):
            engine = Engine(asked)
            row = engine.add([40], LOOP * 2)
            while not row.is_done:
                engine.step()
            assert row.num_steps <= 6

    def test_is_kept_by_generate_too(self, tmp_path):
        path = tmp_path / "learned"
        engine = Engine(proposer(remember=str(path)))
        engine.add([40], LOOP * 2)
        engine.step()
        engine.step()
        del engine
        remembered, memory = opened_by_generate(path)
        learn(memory, [7])
        remembered.save()
        kept = read_cache(path.with_suffix(".safetensors"))
        assert 7 in kept.tables["lut"]["tokens"]
        assert kept.answers.tolist()[:2] == LOOP[:2]

    def test_is_saved_while_vllm_works(self, tmp_path, monkeypatch):
        monkeypatch.setattr(vllm, "_SAVE_SECONDS", 0.01)
        engine = Engine(proposer(remember=str(tmp_path / "learned")))
        engine.add([40], LOOP * 2)
        engine.step()
        engine.step()
        wait_until((tmp_path / "learned.safetensors").exists)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_is_saved_at_the_end_by_one_of_a_tensor_parallel_group(self, tmp_path, rank):
        engine = Engine(proposer(remember=str(tmp_path / "learned"), rank=rank))
        engine.add([40], LOOP * 2)
        engine.step()
        engine.step()
        del engine
        assert (tmp_path / "learned.safetensors").exists() == (rank == 0)

    def test_comes_from_a_cache_too(self, tmp_path):
        held = CacheContents(tokenizer=tokenizer_info(FakeTokenizer()), corpus=count_grams(LOOP))
        save_cache(tmp_path / "built", held)
        engine = Engine(proposer(cache=str(tmp_path / "built")))
        row = engine.add([40], [3, *LOOP])
        engine.step()
        assert row.draft[:2] == [1, 4]

    def test_of_generate_is_drafted_from(self, tmp_path):
        remembered, memory = opened_by_generate(tmp_path / "learned")
        learn(memory, [7])
        remembered.save()
        engine = Engine(proposer(remember=str(tmp_path / "learned")))
        row = engine.add([40], [7, 5, 3])
        engine.step()
        assert row.draft == [5]

    def test_of_another_tokenizer_is_refused(self, tmp_path):
        other = tokenizer_info(FakeTokenizer(VOCAB_SIZE - 1))
        save_cache(tmp_path / "built", CacheContents(tokenizer=other))
        with pytest.raises(CacheError, match="was made for tokenizer"):
            proposer(cache=str(tmp_path / "built"))


class TestOptions:
    def test_config_names_the_class(self):
        asked = config(tokens=4)["speculative_config"]
        module, _, name = asked["model"].rpartition(".")
        assert getattr(sys.modules[module], name) is Proposer
        assert asked["num_speculative_tokens"] == 4

    @pytest.mark.parametrize("wrong", [0, -1, 2.5, True])
    def test_tokens_are_a_number(self, wrong: Any):
        with pytest.raises(ConfigError, match=rf"tokens must be .* >= 1 \(got {wrong}\)"):
            config(tokens=wrong)

    @pytest.mark.parametrize("wrong", [1, -0.1, "0.1", float("nan")])
    def test_the_least_chance_is_one(self, wrong: Any):
        with pytest.raises(ConfigError, match="least_chance must be in"):
            config(least_chance=wrong)

    @pytest.mark.parametrize("options", [{"remembr": "x"}, "x"])
    def test_a_wrong_option_is_refused_when_vllm_starts(self, options: Any):
        asked = SimpleNamespace(additional_config={"selfspec": options})
        with pytest.raises(ConfigError, match=r"did you mean 'remember'|must be a table"):
            Proposer(asked)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens to rows, the session of each has read that row's text."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(proposer(tokens=3, max_length=200), 200)
        self.preempted: list[Row] = []

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
        reads_for=st.integers(0, 2),
    )
    def add(self, prompt: list[int], reads_for: int) -> None:
        self.engine.add(prompt, [token % 3 for token in prompt] * 3 + LOOP * 6, reads_for=reads_for)

    @precondition(lambda self: self.engine.rows)
    @rule(data=st.data(), comes_back=st.booleans())
    def remove(self, data: st.DataObject, comes_back: bool) -> None:
        row = data.draw(st.sampled_from(self.engine.rows))
        self.engine.rows.remove(row)
        row.draft = []
        if comes_back:
            self.preempted.append(row)

    @precondition(lambda self: self.preempted)
    @rule(reads_for=st.integers(0, 2))
    def come_back(self, reads_for: int) -> None:
        row = self.preempted.pop()
        row.reads_for = reads_for
        self.engine.rows.append(row)

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        self.engine.rows = data.draw(st.permutations(self.engine.rows))

    @rule(proposes=st.booleans())
    def step(self, proposes: bool) -> None:
        self.engine.rows = [row for row in self.engine.rows if not row.is_done]
        self.engine.step(proposes=proposes)
        if not proposes:
            return
        asked, serials = self.engine.proposer, set()
        written = [row for row in self.engine.rows if row.has_written]
        for row in written:
            end = np.array([len(row.text)])
            before = windows(np.array([row.text]), np.zeros(1, int), end, vllm._TAIL)
            (name,) = vllm._names(before, end)
            found = asked._sessions[name]
            serials |= {each.serial for each in found if each.step == asked._num_steps}
        assert len(serials) == len(written)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=20)
