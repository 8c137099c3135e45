"""What is found is the newest place that a full search finds, and is followed to its text's end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from selfspec.config import SpecConfig
from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import DraftMemory
from selfspec.draft.sources import AnswersSource, RowStart
from selfspec.draft.sources.answers import AnswersCursor
from selfspec.records import DraftTree, StepRecord
from tests.oracles import Said, newest_said
from tests.scripted import EOS, PAD, Run, ScriptedModel
from tests.strategies import candidates_of, texts

LENGTHS = (12, 4)
MOST = 40  # tokens of the memory of the machine
STORY = list(range(100, 160))


def committed(tokens: list[int]) -> StepRecord:
    return StepRecord(row=0, tree=DraftTree.of_root(0), path=[0], committed_ids=tokens)


def opened(source: AnswersSource, prompt: list[int], *, learns: bool = True) -> AnswersCursor:
    return source.open(RowStart(prompt_ids=prompt, learns=learns))


def written(
    source: AnswersSource, text: list[int], prompt: list[int], step: int = 3
) -> AnswersCursor:
    """A row that has written a text, some tokens a step."""
    cursor = opened(source, prompt)
    for start in range(0, len(text), step):
        cursor.observe(committed(text[start : start + step]))
    return cursor


def told(cursor: AnswersCursor, most: int = 100) -> list[int]:
    """The tokens that it names one after the other, each after the one before."""
    state, tokens = cursor.root(), list[int]()
    while len(tokens) < most and (named := candidates_of(cursor, state)):
        tokens.append(named[0].token)
        state = named[0].state
    return tokens


class TextsMachine(RuleBasedStateMachine):
    """Rows come, write in turns and are forgotten; some copy what another one has written."""

    def __init__(self) -> None:
        super().__init__()
        self.source = AnswersSource(MOST)
        self.said: list[Said] = []  # All of it, the oldest first.
        self.rows: list[tuple[list[int], AnswersCursor]] = []  # Each with its text so far.
        self.tokens: dict[int, list[int]] = {}  # What each row has written.

    @property
    def kept(self) -> list[Said]:
        return self.said[-MOST:]

    @rule(prompt=texts(max_size=6, alphabet=2))
    def comes(self, prompt):
        self.rows.append((list(prompt), opened(self.source, prompt)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tokens=texts(max_size=5, alphabet=2))
    def writes(self, data, tokens):
        row = data.draw(st.integers(0, len(self.rows) - 1))
        text, cursor = self.rows[row]
        for token in tokens:
            self.said.append(Said(len(self.said), row, tuple(text), token))
            text.append(token)
        if tokens:
            self.tokens.setdefault(row, []).extend(tokens)
            cursor.observe(committed(tokens))

    @precondition(lambda self: any(said.text < len(self.rows) - 1 for said in self.said))
    @rule(data=st.data())
    def copies(self, data):
        start = data.draw(st.sampled_from(self.said))
        ids = [said.token for said in self.said if said.text == start.text]
        text, cursor = self.rows[-1]
        for token in ids[:8]:
            self.said.append(Said(len(self.said), len(self.rows) - 1, tuple(text), token))
            text.append(token)
            self.tokens.setdefault(len(self.rows) - 1, []).append(token)
            cursor.observe(committed([token]))

    @invariant()
    def what_the_index_finds_is_the_newest(self):
        """A key may have lost its slot to another one; what is found is never anything else."""
        for text, cursor in self.rows:
            keys = dict(zip(reversed(LENGTHS), cursor._keys, strict=False))
            assert len(keys) == sum(length <= len(text) for length in LENGTHS)
            for length, key in keys.items():
                newest = newest_said(self.kept, text, length)
                place = self.source.find(key)
                found = self.source.token(place) if place >= 0 else -1
                assert found == -1 or (newest is not None and place == newest.number)

    @invariant()
    def what_is_named_was_written_after_the_last_token(self):
        for text, cursor in self.rows:
            for place, _ in cursor.root().matches:
                for said in self.kept:
                    if said.number == place:
                        assert said.before[-1:] == tuple(text[-1:])

    @invariant()
    def texts_are_whole_but_for_their_oldest_tokens(self):
        ids = self.source.arrays().get("tokens", np.array([], np.int32)).tolist()
        expected = {}
        for said in self.kept:
            expected.setdefault(said.text, []).append(said)
        ends = sorted(expected.values(), key=lambda text: text[-1].number)
        assert ids == [token for text in ends for token in [*(s.token for s in text), -1]]


TestTexts = TextsMachine.TestCase
TestTexts.settings = settings(max_examples=60, stateful_step_count=14)


def test_the_same_question_again_is_answered_whole():
    source = AnswersSource()
    prompt = list(range(20))
    written(source, STORY, prompt)
    again = opened(source, prompt)
    again.observe(committed(STORY[:1]))
    assert told(again) == STORY[1:]


def test_another_prompt_is_found_by_the_answer_itself():
    source = AnswersSource()
    written(source, STORY, [1, 2, 3])
    other = opened(source, [7, 8, 9])
    other.observe(committed(STORY[20:23]))
    assert told(other) == []
    other.observe(committed([STORY[23]]))
    assert told(other) == STORY[24:]
    (candidate,) = other.expand(other.root())
    assert candidate[1].match_length == 4


@pytest.mark.parametrize("num_other", [1, 2, 5])
def test_after_tokens_that_differ_the_texts_may_go_on_alike(num_other: int):
    """They were inserted, or replace as many, or one."""
    source = AnswersSource()
    written(source, STORY, [])
    cursor = opened(source, [], learns=False)
    cursor.observe(committed(STORY[:5]))
    cursor.observe(committed([*STORY[5:9], *[7] * num_other]))
    ways_on = dict.fromkeys([STORY[9], STORY[9 + num_other], STORY[10]])
    assert [token for token, _ in cursor.expand(cursor.root())] == list(ways_on)
    cursor.observe(committed([STORY[10]]))
    assert told(cursor) == STORY[11:]
    cursor.observe(committed(list(range(900, 917))))
    assert told(cursor) == []


@pytest.mark.parametrize("num_other", [0, 30])
def test_after_the_end_of_a_text_no_other_one_begins(num_other: int):
    """Neither while the ring fills, nor once it is full."""
    source = AnswersSource(MOST)
    written(source, list(range(900, 900 + num_other)), [])
    written(source, STORY[:10], [])
    cursor = opened(source, [], learns=False)
    cursor.observe(committed(STORY[:6]))
    place = cursor.root()
    for token in STORY[6:10]:
        place = cursor.follow(place, token)
    assert cursor.expand(place) == []
    written(source, [1, 2, 3], [])
    cursor.observe(committed([*STORY[6:10], 7]))
    assert told(cursor) == []


def test_the_longer_a_match_has_held_the_surer_it_is():
    source = AnswersSource()
    written(source, STORY, [])
    cursor = opened(source, [])
    lengths = []
    for token in STORY[:50]:
        cursor.observe(committed([token]))
        lengths += [kind.match_length for _, kind in cursor.expand(cursor.root())]
    assert lengths == sorted(lengths)
    assert set(lengths) == {4, 6, 10, 16, 24, 40}


def test_of_two_answers_the_newer_one_is_told_and_a_longer_match_wins():
    source = AnswersSource()
    written(source, [*STORY[:20], 1, 1, 1], [])
    written(source, [5, 5, *STORY[16:20], 2, 2, 2], [])
    short, long = opened(source, []), opened(source, [])
    short.observe(committed(STORY[16:20]))
    long.observe(committed(STORY[4:20]))
    assert (told(short)[0], told(long)[0]) == (2, 1)


def test_rows_of_one_batch_copy_from_each_other_while_they_write():
    source = AnswersSource()
    ahead, behind = opened(source, [1]), opened(source, [1])
    ahead.observe(committed(STORY[:10]))
    behind.observe(committed(STORY[:5]))
    assert told(behind) == STORY[5:10]
    behind.observe(committed(STORY[5:10]))
    assert told(behind) == []
    ahead.observe(committed(STORY[10:15]))
    behind.observe(committed(STORY[10:12]))
    assert told(behind) == STORY[12:15]


def test_what_was_saved_is_found_again():
    source, other = AnswersSource(), AnswersSource()
    written(source, STORY, [1, 2, 3])
    written(source, [9, 8, 7, 6, 5, 4, 3], [])
    other.restore(source.arrays())
    assert other.arrays()["tokens"].tolist() == [*STORY, -1, 9, 8, 7, 6, 5, 4, 3, -1]
    cursor = opened(other, [])
    cursor.observe(committed(STORY[:7]))
    assert told(cursor) == STORY[7:]
    cursor = opened(other, STORY[:56])
    cursor.observe(committed(STORY[56:59]))
    assert told(cursor) == STORY[59:]  # No text goes on in the next one.
    cursor = opened(other, [*STORY[-2:], 9, 8])
    cursor.observe(committed([7]))
    assert told(cursor) == []


def test_a_text_that_was_cut_off_goes_on_in_no_other():
    source = AnswersSource()
    source.restore({"tokens": np.array(STORY[:9], np.int32)})
    written(source, STORY[30:], [])
    assert source.arrays()["tokens"].tolist() == [*STORY[:9], -1, *STORY[30:], -1]
    cursor = opened(source, [])
    cursor.observe(committed(STORY[:5]))
    assert told(cursor) == STORY[5:9]


def test_the_newest_of_what_was_saved_fits_a_smaller_memory():
    source, small = AnswersSource(), AnswersSource(16)
    written(source, STORY, [])
    small.restore(source.arrays())
    assert small.arrays()["tokens"].tolist() == [*STORY[-15:], -1]


def test_most_of_a_full_memory_is_found():
    """Of keys that share a slot the older one is lost: a fifth of them, but rarely both."""
    most = 1 << 12
    source, text = AnswersSource(most), np.random.default_rng(1).integers(0, 1 << 15, most).tolist()
    written(source, text, [], step=8)
    num_found = 0
    for start in range(0, most - 40, 40):
        cursor = opened(source, text[start : start + 16])
        cursor.observe(committed(text[start + 16 : start + 17]))
        num_found += told(cursor, 5) == text[start + 17 : start + 22]
    assert num_found > 0.9 * (most // 40)


def test_pads_after_the_end_of_a_row_are_not_written():
    model, source = ScriptedModel(seed=1), AnswersSource()
    prompts = [[1, 2, 3], [3, 2, 1], [2, 2, 1], [4, 1, 3]]
    run = Run(model, prompts, [source], max_length=60, eos=EOS, config=SpecConfig(max_nodes=3))
    ids = run.decode(run.together())
    assert any(row.count(PAD) > 9 for row in ids)
    num_said = sum(len(row) - 3 - row.count(PAD) for row in ids)
    assert sum(source.arrays()["tokens"] >= 0) - num_said < 2 * len(prompts)


@pytest.mark.parametrize("scope", ["session", "request", "frozen"])
def test_how_far_it_reaches(scope: str):
    source = AnswersSource()
    written(source, STORY, [])
    learned = DraftMemory([source], Calibration(), top_k=3)
    for_call = learned.for_request(scope)
    row = for_call.sources[0].open(RowStart(prompt_ids=[], learns=for_call.learns))
    row.observe(committed([*STORY[:20], 1, 2, 3, 4, 5, 6]))
    beside = for_call.sources[0].open(RowStart(prompt_ids=[], learns=for_call.learns))
    beside.observe(committed([1, 2, 3, 4]))
    assert told(beside) == ([] if scope == "frozen" else [5, 6])
    later = opened(source, [])
    later.observe(committed([1, 2, 3, 4]))
    assert told(later) == ([5, 6] if scope == "session" else [])
    later = opened(source, [])
    later.observe(committed(STORY[:10]))
    assert told(later)[:10] == STORY[10:20]
