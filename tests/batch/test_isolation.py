"""A prompt that fails has its error as its answer, and every other text is as without it."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from selfspec import SelfSpec, UnsupportedError
from selfspec.batch.answers import Answer
from selfspec.draft.drafter import Drafter
from selfspec.draft.sources import RowStart, Source
from selfspec.engine import Engine
from selfspec.forward import prompt as prompt_module
from selfspec.forward.backends import TreeBackend
from selfspec.forward.tree_kv import TreeKV
from selfspec.prompt import Prompt
from selfspec.row import Row
from tests.batch.test_session import Broken, FixedPace, Fuse
from tests.fakes import PAD, VOCAB, WildSource, new_model, prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import GREEDY, MODES, SAMPLE, run_both
from tests.recorder import use_recorders
from tests.scripted import TextCursor, TextSource
from tests.sessions import TextSession
from tests.sessions import alone as new_tokens
from tests.sessions import wild as wild_with

NUM_NEW = 10
ILL = VOCAB - 1  # The token by which a prompt is known that will fail.


class OfOne(Fuse):
    """The same as a stopping rule, which may look at more than its row."""

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # type: ignore[override]
        self.burn()
        return torch.zeros(len(ids), dtype=torch.bool)


class Treacherous(TextSource):
    """Knows nothing, and breaks where a text begins with `ILL`."""

    def __init__(self, fuse: Fuse, place: str) -> None:
        super().__init__("treacherous", lambda _text: [])
        self.fuse, self.place = fuse, place

    def open(self, row: RowStart) -> TextCursor:
        cursor = super().open(row)
        if row.prompt_ids[0] == ILL and self.place == "open":
            self.fuse.burn()
        elif row.prompt_ids[0] == ILL:
            work = getattr(cursor, self.place)
            setattr(cursor, self.place, lambda *given: self.fuse.burn() or work(*given))
        return cursor


def prompts(number: int = 5) -> list[list[int]]:
    """Random ids; the second one will fail."""
    dice = torch.Generator().manual_seed(5)
    lengths = [9, 3, 31, 1, 14] * number
    ids = [torch.randint(PAD + 1, ILL, (n,), generator=dice).tolist() for n in lengths[:number]]
    ids[1][0] = ILL
    return ids


alone = partial(new_tokens, max_new_tokens=NUM_NEW)


def wild(*sources: Source, **knobs: Any) -> SelfSpec:
    return wild_with(extra_sources=[WildSource(ILL), *sources], **knobs)


def played(session: TextSession, **of_the_second: Any) -> dict[int, Answer]:
    """The answers to all prompts, of which the second one has arguments of its own."""
    common = of_the_second.pop("common", {})
    for index, ids in enumerate(prompts()):
        own = of_the_second if index == 1 else {}
        session.submit(index, ids, index, {"max_new_tokens": NUM_NEW, **common, **own})
    answers = session.answers()
    assert sorted(answers) == list(range(5))
    assert session.kv_bytes_in_use == session.num_running == 0
    return answers


def assert_only_the_second_failed(
    answers: dict[int, Answer], model: Any, error: type[Exception] = Broken, **options: Any
) -> None:
    for index, ids in enumerate(prompts()):
        answer, expected = answers[index], alone(model, ids, index, **options)
        if index == 1:
            assert type(answer.error) is error
            assert answer.finish_reason == "error"
            assert answer.ids == expected[: len(answer.ids)]
        else:
            assert answer.error is None
            assert answer.ids == expected, f"prompt {index}"


TIMES = {"first": 1, "middle": 4, "last": NUM_NEW}


@pytest.mark.parametrize(
    ("at", "mode"), [("first", "greedy"), ("middle", "sample"), ("last", "greedy")]
)
@pytest.mark.parametrize("who", ["processor", "stopping rule", "rule of its row", "listener"])
def test_an_error_of_somebody_elses_code(who: str, at: str, mode: str) -> None:
    """A stopping rule sends its prompt aside, unless it looks at rows and a token ends texts."""
    fuse, own, common = Fuse(TIMES[at]), {}, dict(MODES[mode])
    if who == "processor":
        own["logits_processor"] = [fuse]
    elif who != "listener":  # After the last token nobody asks the rules of a row.
        own["stopping_criteria"] = StoppingCriteriaList([OfOne(min(TIMES[at], NUM_NEW - 1))])
    if who == "rule of its row":
        common["eos_token_id"] = VOCAB - 2

    def on_token(index: int, ids: Sequence[int]) -> bool:
        if who == "listener" and index == 1:
            fuse.burn()
        return True

    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), max_rows=3, on_token=on_token)
    answers = played(session, common=common, **own)
    assert_only_the_second_failed(answers, tiny_model(), **common)
    assert who != "processor" or len(answers[1].ids) == TIMES[at] - 1
    assert bool(session.alone_reasons) == (who == "stopping rule")


@pytest.mark.parametrize("place", ["open", "root", "observe"])
@pytest.mark.parametrize("at", [1, 2])
def test_an_error_of_a_source(place: str, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and ends no text: nothing more is drafted from that source."""
    fuse = Fuse(at if place != "open" else 1)
    session = TextSession(
        tiny_model(), tiny_tokenizer(), wild(Treacherous(fuse, place)), max_rows=3
    )
    for index, answer in played(session).items():
        assert answer.error is None
        assert answer.ids == alone(tiny_model(), prompts()[index], index)
    assert fuse.left == 0, "it is asked nothing more"
    said = [each.getMessage() for each in caplog.records if each.name == "selfspec"]
    assert [text for text in said if "'treacherous' has failed" in text] == said
    assert len(said) == 1


def test_an_error_while_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = prompt_module.prefill

    def watched(model: Any, ids: torch.Tensor, *rest: Any) -> Any:
        if ids[0, 0] == ILL:
            raise torch.OutOfMemoryError("on purpose")
        return read(model, ids, *rest)

    monkeypatch.setattr(prompt_module, "prefill", watched)
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), max_rows=3)
    answers = played(session, common=SAMPLE)
    monkeypatch.undo()
    assert_only_the_second_failed(answers, tiny_model(), torch.OutOfMemoryError, **SAMPLE)


@pytest.mark.parametrize("where", ["slots", "row"])
def test_an_error_while_a_row_comes(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before or after its keys and values are there."""
    kind, name = (TreeKV, "add") if where == "slots" else (Drafter, "__init__")
    work, fuse, spec = getattr(kind, name), Fuse(2), wild()
    spec.support(tiny_model())  # The trial has slots too.

    def watched(*args: Any, **options: Any) -> Any:
        fuse.burn()
        return work(*args, **options)

    monkeypatch.setattr(kind, name, watched)
    session = TextSession(tiny_model(), tiny_tokenizer(), spec, max_rows=3)
    assert_only_the_second_failed(played(session), tiny_model())


def test_an_error_of_decoding_the_text() -> None:
    class Careful:
        """A tokenizer that can't read everything."""

        def decode(self, ids: list[int], **options: Any) -> str:
            if ids == written:
                raise Broken("on purpose")
            return tiny_tokenizer().decode(ids, **options)  # type: ignore[no-any-return]

    written = alone(tiny_model(), prompts()[1], 1)
    session = TextSession(tiny_model(), Careful(), wild(), max_rows=3)
    answers = played(session)
    assert_only_the_second_failed(answers, tiny_model())
    assert answers[1].ids == written


def test_a_listener_that_breaks_is_the_fault_of_what_it_heard() -> None:
    spec, fuse = wild(), Fuse(3)
    session = TextSession(tiny_model(), tiny_tokenizer(), spec, max_rows=3)
    with spec.listening(lambda record: fuse.burn() if record.row == 1 else None):
        assert_only_the_second_failed(played(session), tiny_model())


@pytest.mark.parametrize("is_late", [False, True])
def test_probabilities_that_are_none(is_late: bool) -> None:
    """The model answers one prompt with NaN, after the prompt or after a token of its own."""
    model, options = new_model(), {"do_sample": True, "eos_token_id": None}
    ids = prompts()
    texts = [alone(model, each, index, **options) for index, each in enumerate(ids)]
    others = {token for i in (0, 2, 3, 4) for token in ids[i] + texts[i]}
    ill = next(each for each in (texts[1] if is_late else ids[1]) if each not in others)
    with torch.no_grad():
        model.get_input_embeddings().weight[ill] = float("nan")
    # No other text may have the token even as a draft.
    spec = SelfSpec(sources=("context",), budget="fixed", max_nodes=6)
    answers = played(TextSession(model, tiny_tokenizer(), spec, max_rows=3), common=options)
    assert [answers[index].ids for index in (0, 2, 3, 4)] == texts[:1] + texts[2:]
    assert "probability tensor" in str(answers[1].error)
    assert answers[1].ids == (texts[1][: texts[1].index(ill) + 1] if is_late else [])


def broken_forward(fails: Callable[[TreeBackend, torch.Tensor], bool]) -> Any:
    """A forward over drafts that breaks after it has written keys and values."""
    lay_out = TreeBackend.lay_out

    def watched(self: TreeBackend, *given: Any) -> Callable[[], torch.Tensor]:
        run = lay_out(self, *given)

        def broken() -> torch.Tensor:
            logits = run()
            if fails(self, logits):
                raise torch.OutOfMemoryError("on purpose")
            return logits

        return broken

    return watched


@pytest.mark.parametrize(
    ("name", "most", "mode"),
    [("llama", 1, "greedy"), ("gemma3", 2, "sample"), ("deepseek-v3", 3, "sample")],
)
def test_a_forward_that_fails_is_tried_again_over_fewer_rows(
    name: str, most: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it succeeds; no text differs, and no random number is drawn twice."""
    sizes: list[int] = []

    def too_many(backend: TreeBackend, logits: torch.Tensor) -> bool:
        sizes.append(len(logits))
        return len(logits) > most

    monkeypatch.setattr(TreeBackend, "lay_out", broken_forward(too_many))
    spec = wild()
    session = TextSession(tiny_model(name), tiny_tokenizer(), spec, max_rows=5)
    for answer in played(session, common=MODES[mode]).values():
        assert answer.error is None
        expected = alone(tiny_model(name), prompts()[answer.index], answer.index, **MODES[mode])
        assert answer.ids == expected
    assert max(sizes) == 5
    assert spec.total_stats.seconds["retry"] > 0
    assert spec.total_stats.num_new_tokens == 5 * NUM_NEW


def test_a_forward_that_fails_over_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, steps = prompts()[1], []

    def is_ill(backend: TreeBackend, logits: torch.Tensor) -> bool:
        there = any(row.start == 0 and row.max_columns in needs for row in backend.kv.forward.rows)
        steps.append(there)
        return there and len(steps) > 6

    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), max_rows=3)
    needs = {session.call(1, ids, 1, {"max_new_tokens": NUM_NEW}).max_columns}
    monkeypatch.setattr(TreeBackend, "lay_out", broken_forward(is_ill))
    answers = played(session, common=SAMPLE)
    assert_only_the_second_failed(answers, tiny_model(), torch.OutOfMemoryError, **SAMPLE)
    assert answers[1].ids


def test_no_memory_for_more_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the row that needs them fails: the others have their places."""
    model, asked = tiny_model(), {0: 20, 1: 300, 2: 20}
    given = [[5, 6, 7], [8, 9], [10]]
    make_room = TreeKV._make_room

    def scarce(self: TreeKV, part: Any, rows: Any, end: int, **asked: Any) -> bool:
        if end > part.size.columns and end > 128:
            raise torch.OutOfMemoryError("on purpose")
        return make_room(self, part, rows, end, **asked)

    monkeypatch.setattr(TreeKV, "_make_room", scarce)
    session = TextSession(model, tiny_tokenizer(), wild(), max_rows=3)
    late = {3: [11, 12], 4: [13]}
    for index, ids in enumerate(given):
        session.submit(index, ids, index, {"max_new_tokens": asked[index]})
    answers: dict[int, Answer] = {}
    while not session.is_empty:
        answers |= {answer.index: answer for answer in session.work()}
        for index, ids in late.items():  # They begin while the long row is there.
            session.submit(index, ids, index, {"max_new_tokens": 100})
        given, late = [*given, *late.values()], {}
    assert isinstance(answers[1].error, torch.OutOfMemoryError)
    assert 100 < len(answers[1].ids) < 300
    for index, ids in enumerate(given):
        most = asked.get(index, 100)
        expected = alone(model, ids, index, max_new_tokens=most)
        assert answers[index].ids == expected[: len(answers[index].ids)]
        assert (answers[index].error is None) == (index != 1)


def test_an_error_in_the_middle_of_a_commit_ends_all_rows_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows which columns were moved; the prompts that wait begin anew."""
    fuse, commit = Fuse(3), TreeKV.commit

    def watched(self: TreeKV, paths: Any) -> None:
        fuse.burn()
        commit(self, paths)

    monkeypatch.setattr(TreeKV, "commit", watched)
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), max_rows=3)
    answers = played(session)
    for index, ids in enumerate(prompts()):
        answer, expected = answers[index], alone(tiny_model(), ids, index)
        assert (answer.error is None) == (index > 2)
        assert answer.ids == expected[: len(answer.ids)]


def test_a_prompt_that_is_being_read_goes_on_after_an_error_of_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if nobody else waits, and before one that is written alone."""
    for follows in (False, True):
        fuse, step = Fuse(3), Engine.step

        def watched(self: Engine, fuse: Fuse = fuse, step: Any = step) -> None:
            fuse.burn()
            step(self)

        session = TextSession(tiny_model(), tiny_tokenizer(), wild(), pace=FixedPace(4))
        session.submit(0, [5, 6, 7], 0, {"max_new_tokens": 20})
        assert not session.step()
        session.submit(1, [*range(3, 23)], 1, {"max_new_tokens": NUM_NEW})
        if follows:
            session.submit(2, [5, 6, 7], 2, {"max_new_tokens": 4, "stopping_criteria": [OfOne(99)]})
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", watched)
            answers = {answer.index: answer for _ in range(20) for answer in session.step()}
        assert isinstance(answers[0].error, Broken)
        assert answers[1].ids == alone(tiny_model(), [*range(3, 23)], 1)
        assert session.is_empty
        assert len(answers) == 2 + follows


@pytest.mark.parametrize("error", [MemoryError, UnsupportedError])
@pytest.mark.parametrize("name", ["_eager_forwards", "limits"])
def test_what_can_not_be_made_ready_is_the_fault_of_one_prompt(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the next one it is tried anew: the model, and the memory."""
    spec, model, fuse = wild(), tiny_model(), Fuse(1, error)
    session, runner = TextSession(model, tiny_tokenizer(), spec, max_rows=3), spec.runner(model)
    work = getattr(runner, name)
    monkeypatch.setattr(runner, name, lambda *args: fuse.burn() or work(*args))
    answers = played(session)
    assert [type(answers[index].error) for index in range(5)] == [error] + [type(None)] * 4


@pytest.mark.parametrize("when", ["while it is read", "with its first token"])
def test_a_cancelled_prompt_keeps_nothing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither slots nor the lock of captured forwards, which other calls of the model may need."""
    use_recorders(monkeypatch)
    spec = wild()

    def on_token(index: int, _ids: Sequence[int]) -> bool:
        if when == "with its first token":
            session.cancel(index)
        return True

    options: dict[str, Any] = {"pace": FixedPace(4), "on_token": on_token}
    session = TextSession(tiny_model(), tiny_tokenizer(), spec, **options)
    session.submit(0, prompts()[0], 0, {"max_new_tokens": NUM_NEW})
    assert not session.step()
    if when == "while it is read":
        session.cancel(0)
    while not session.is_empty:
        assert not session.step()
    assert spec.total_stats.num_calls == 1
    both = run_both(tiny_model(), prompt(), spec, drafts=False, **GREEDY)
    assert (both.stats.forward, both.stats.eager_reason) == ("graph", None)


def test_an_interrupt_while_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of it is in pieces, so it ends as the rows that run do; others go on."""
    session = TextSession(tiny_model(), tiny_tokenizer(), wild(), pace=FixedPace(4))
    session.submit(0, prompts()[0], 0, {"max_new_tokens": 20})
    assert not session.step()
    for index in (1, 2):
        session.submit(index, [*range(3, 23)], 1, {"max_new_tokens": NUM_NEW})
    read, fuse = prompt_module.prefill, Fuse(2, KeyboardInterrupt)  # type: ignore[arg-type]

    def watched(*args: Any) -> Any:
        outputs = read(*args)
        fuse.burn()
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(prompt_module, "prefill", watched)
        with pytest.raises(KeyboardInterrupt):
            [session.step() for _ in range(9)]
    (answer,) = session.work()
    assert (answer.index, session.is_empty) == (2, True)
    assert answer.ids == alone(tiny_model(), [*range(3, 23)], 1)


@pytest.mark.parametrize("num_new", [1, 2])
def test_an_interrupt_loses_no_text_whose_last_token_came_in_the_same_step(num_new: int) -> None:
    """With the prompt, or in a forward that both texts share; the next step returns it."""
    session = TextSession(tiny_model(), tiny_tokenizer(), wild())
    fuse = Fuse(num_new, KeyboardInterrupt)  # type: ignore[arg-type]
    given = ({"max_new_tokens": num_new}, {"max_new_tokens": NUM_NEW, "logits_processor": [fuse]})
    for index, options in enumerate(given):
        session.submit(index, prompts()[index], index, options)
    with pytest.raises(KeyboardInterrupt):
        session.step()
    assert not session.is_empty
    (answer,) = session.step()
    assert (answer.index, answer.error, session.is_empty) == (0, None, True)
    assert answer.ids == alone(tiny_model(), prompts()[0], 0, max_new_tokens=num_new)


def test_a_call_of_its_own_raises_what_it_always_raised() -> None:
    """With nothing around it, and no other row goes on."""
    from selfspec import attach

    model, inputs = attach(new_model()), torch.tensor([[5, 6, 7], [8, 9, 10]])
    with pytest.raises(Broken) as caught:
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            assistant=wild(),
            logits_processor=[Fuse(6)],
            max_new_tokens=NUM_NEW,
        )
    assert caught.value.__context__ is None
    assert caught.traceback[-1].name == "burn"


# `generate_many`


@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_failed_leaves_no_memory(number: int) -> None:
    """As many prompts that fail as there are others, and all answers are kept."""

    def num_alive() -> int:
        gc.collect()
        return sum(type(value) in (Prompt, Row) for value in gc.get_objects())

    num_before = num_alive()
    model = tiny_model()
    spec = SelfSpec(budget="fixed", max_nodes=4, learning="frozen", sources=("context",))
    session = TextSession(model, tiny_tokenizer(), spec, max_rows=16)
    given = [[5 + index % 40, 6, 7] for index in range(2 * number)]
    expected = {ids[0]: alone(model, ids, 0, max_new_tokens=3) for ids in given[:40]}
    answers, sizes = [], set()
    for index, ids in enumerate(given):
        broken = {"logits_processor": [Fuse(1 + index // 2 % 3)]} if index % 2 else {}
        session.submit(index, ids, index, {"max_new_tokens": 3, **broken})
        while not session.num_wanted or (index == 2 * number - 1 and not session.is_empty):
            answers += session.step()
            sizes.add(session.kv.nbytes if session.kv else 0)
    assert num_alive() <= num_before
    assert session.kv_bytes_in_use == 0
    assert max(sizes) <= 2 * min(sizes - {0})
    assert len(answers) == 2 * number
    for answer in answers:
        assert isinstance(answer.error, Broken) == bool(answer.index % 2)
        if answer.error is None:
            assert answer.ids == expected[given[answer.index][0]]
    error = answers[-1].error or answers[-2].error
    assert error is not None
    assert "burn" in "".join(traceback.format_exception(error))
