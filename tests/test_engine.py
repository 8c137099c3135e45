"""Whatever is drafted, the text is the plain loop's; and every step is counted and told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import SelfSpec, attach
from selfspec.config import SpecConfig
from selfspec.draft.calibration import FixedPrior
from selfspec.draft.sources import (
    ContextSource,
    LutSource,
    NearMissesSource,
)
from selfspec.records import Evidence
from selfspec.stats import GenerationStats
from selfspec.verify.choosers import ProcessedChooser, Processing
from selfspec.verify.tape import NoiseTape
from tests.fakes import prompt, tiny_model
from tests.oracles import greedy_loop, padded
from tests.scripted import (
    EOS,
    PAD,
    VOCAB,
    Run,
    ScriptedBackend,
    ScriptedModel,
    TextSource,
    doubtful,
    hostile,
    omniscient,
    unchanged,
    wild,
)

DRAFTERS = ("context", "doubt", "lies", "lut", "near_misses", "truth", "wild")


def sources_of(names: set[str], model: ScriptedModel) -> list[Any]:
    made = {
        "context": ContextSource(4),
        "doubt": doubtful(model),
        "lies": hostile(model),
        "lut": LutSource(VOCAB, 3),
        "near_misses": NearMissesSource(),
        "truth": omniscient(model),
        "wild": wild(1),
    }
    return [made[name] for name in sorted(names)]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    model = ScriptedModel(draw(st.integers(0, 999)), order=draw(st.integers(1, 3)))
    length = draw(st.integers(1, 4))
    prompt = st.lists(st.integers(1, EOS - 1), min_size=length, max_size=length)
    return Run(
        model,
        draw(st.lists(prompt, min_size=1, max_size=3)),
        sources_of(draw(st.sets(st.sampled_from(DRAFTERS))), model),
        max_length=length + draw(st.integers(1, 18)),
        eos=draw(st.sampled_from([None, EOS])),
        config=SpecConfig(
            max_nodes=draw(st.integers(1, 9)),
            max_depth=draw(st.integers(1, 5)),
            top_k=draw(st.integers(1, 4)),
        ),
        learns=draw(st.booleans()),
    )


def plain_text(run: Run) -> list[list[int]]:
    return padded(
        [greedy_loop(run.model.next_token, p, run.max_length, run.eos) for p in run.prompts], PAD
    )


@settings(max_examples=60, deadline=None)
@given(runs(), st.sampled_from(["greedy", "together", "processed"]))
def test_the_text_is_the_plain_loops_whatever_is_drafted(run, chooser):
    assert run.decode(getattr(run, chooser)()) == plain_text(run)
    assert max(run.backend.widths, default=1) <= run.config.max_nodes
    assert retold(run) == counts(run.stats)
    if chooser != "together":
        check_rows_are_dropped_when_done(run)


def counts(stats: GenerationStats) -> dict[str, Any]:
    names = ("num_new_tokens", "num_prompt_tokens_out", "num_steps", "num_nodes")
    counters = ("accepted_lengths", "drafted_by_source", "accepted_by_source")
    return {name: getattr(stats, name) for name in (*names, *counters)}


def retold(run: Run) -> dict[str, Any]:
    """The statistics, counted once more from the records."""
    first, rest = run.records[: len(run.prompts)], run.records[len(run.prompts) :]
    stats = GenerationStats(num_new_tokens=len(first), num_prompt_tokens_out=len(first))
    for record in rest:
        assert len(record.committed_ids) == record.num_accepted + 1
        stats.num_steps += 1
        stats.num_nodes += len(record.tree)
        stats.num_new_tokens += record.num_accepted + 1
        stats.accepted_lengths[record.num_accepted] += 1
        for node, kinds in enumerate(record.tree.evidence):
            names = Counter(kind.source for kind in kinds)
            stats.drafted_by_source += names
            if node in record.path:
                stats.accepted_by_source += names
    return counts(stats)


def check_rows_are_dropped_when_done(run: Run) -> None:
    """Each record of a row adds to its text, and none comes once the row has stopped."""
    for row, ids in enumerate(run.prompts):
        told = [t for r in run.records if r.row == row for t in r.committed_ids]
        assert ids + told == greedy_loop(run.model.next_token, ids, run.max_length, run.eos)


MODEL = ScriptedModel(seed=3)


def test_an_omniscient_chain_is_counted_exactly():
    """4 nodes, 3 of them drafts: 4 tokens a step behind the prompt's own; the last step has 2.

    Its tree is no deeper than that.
    """
    prompts = [[1, 2], [3, 4]]
    run = Run(MODEL, prompts, [omniscient(MODEL)], 2 + 15, config=SpecConfig(max_nodes=4))
    run.decode()
    assert counts(run.stats) == {
        "num_new_tokens": 30,
        "num_prompt_tokens_out": 2,
        "num_steps": 8,
        "num_nodes": 28,
        "accepted_lengths": {3: 6, 1: 2},
        "drafted_by_source": {"truth": 20},
        "accepted_by_source": {"truth": 20},
    }
    assert run.stats.tokens_per_step == 3.5
    assert run.stats.nodes_per_step == 3.5
    stages = {"draft", "layout", "forward", "verify", "commit", "learn"}
    assert set(run.stats.seconds) == stages


def test_each_stage_gets_the_time_of_its_verb():
    class Clocked(ScriptedBackend):
        now = 0

        def lay_out(self, *asked):
            self.now += 1
            return super().lay_out(*asked)

        def run(self, layout):
            self.now += 10
            return super().run(layout)

        def commit(self, paths):
            self.now += 100
            super().commit(paths)

    run = Run(MODEL, [[1, 2]], [omniscient(MODEL)], max_length=12)
    run.backend = backend = Clocked(MODEL, [[1, 2]])
    run.clock = lambda: backend.now
    run.decode()
    number = run.stats.num_steps
    spent = {stage: seconds for stage, seconds in run.stats.seconds.items() if seconds}
    assert spent == {"layout": number, "forward": 10 * number, "commit": 100 * number}
    assert run.stats.step_seconds == 111 * number


def test_a_backend_may_ask_for_narrower_trees():
    run = Run(MODEL, [[1, 2]], [omniscient(MODEL)], max_length=2 + 1 + 3 + 1 + 6)
    run.backend.max_widths = iter([3, 1, 100])
    assert run.decode() == plain_text(run)
    assert run.backend.widths == [3, 1, 6]


def rows_of_different_lengths() -> tuple[ScriptedModel, list[list[int]]]:
    """A model and prompts of which one row meets its end token well before the others."""
    for seed in range(200):
        model = ScriptedModel(seed)
        prompts = [[1, 2], [3, 4], [5, 1]]
        lengths = [len(greedy_loop(model.next_token, p, 30, EOS)) for p in prompts]
        if lengths[1] < 12 and min(lengths[0], lengths[2]) > 20:
            return model, prompts
    raise AssertionError("no such model")


def test_rows_that_stopped_leave_the_batch():
    model, prompts = rows_of_different_lengths()
    run = Run(model, prompts, [omniscient(model)], 30, EOS)
    assert run.decode() == plain_text(run)
    assert run.backend.kept[0] == [0, 2]
    assert len(run.backend.texts) <= 2


def test_rows_that_move_together_stay_and_get_pads():
    model, prompts = rows_of_different_lengths()
    run = Run(model, prompts, [omniscient(model)], 30, EOS)
    assert run.decode(run.together()) == plain_text(run)
    assert run.backend.kept == []
    padded_row = [r for r in run.records if r.row == 1]
    text = [t for r in padded_row for t in r.committed_ids]
    assert set(text[text.index(EOS) + 1 :]) == {PAD}
    # the pads that are sure to come hold nobody up
    assert run.stats.accepted_lengths[run.config.max_nodes - 1] > 0


def sampling_loop(run: Run) -> list[list[int]]:
    """Stock's loop: one draw a step for all rows, pads for those that stopped."""
    texts = [list(prompt) for prompt in run.prompts]
    done = [False] * len(texts)
    while not all(done):
        logits = torch.stack([run.model.logits(tuple(text)) for text in texts])
        drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()
        for row, (text, token) in enumerate(zip(texts, drawn, strict=True)):
            text.append(PAD if done[row] else token)
            done[row] = done[row] or token == run.eos or len(text) >= run.max_length
    return texts


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(0, 99), st.booleans())
def test_the_same_seed_gives_the_same_samples_and_leaves_the_same_generator(run, seed, together):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stock = sampling_loop(run)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        alone = run.processed(NoiseTape(len(run.prompts)))
        assert run.decode(run.together(do_sample=True) if together else alone) == stock
        assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_freed_once_every_row_is_past_it():
    tape = NoiseTape(2)
    run = Run(MODEL, [[1, 2], [3, 4]], [doubtful(MODEL), wild(4)], max_length=80)
    held = []

    class Watching(ProcessedChooser):
        def commit(self, *args: Any) -> Any:
            news = [row.num_new for row in run.rows]
            held.append(len(tape._noise) - (max(news) - min(news)))
            return super().commit(*args)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        run.decode([Watching(Processing(unchanged), tape, row) for row in range(2)])
    assert max(held) <= run.config.max_nodes


# what a call learns and leaves behind


def test_a_frozen_memory_keeps_its_tables_and_its_rates():
    lut = LutSource(VOCAB, 3)
    run = Run(MODEL, [[1, 2]], [lut, omniscient(MODEL)], learns=False)
    run.decode()
    assert not (lut.token_ids >= 0).any()
    assert run.learned.calibration._rates == {}
    assert all(record.top is None for record in run.records)


def test_a_source_that_cannot_learn_is_named_once_and_the_others_learn(caplog):
    class Broken(LutSource):
        def observe_pairs(self, *_: Any) -> None:
            raise ValueError("on purpose")

    lut, broken = LutSource(VOCAB, 3), Broken(VOCAB, 3)
    broken.name = "broken"
    run = Run(MODEL, [[1, 2]], [broken, lut])
    assert run.decode() == plain_text(run)
    assert (lut.token_ids >= 0).any()
    said = [text for each in caplog.records if "failed" in (text := each.getMessage())]
    assert len(said) == 1
    assert "'broken' has failed, and has not learned" in said[0]


@pytest.mark.parametrize(
    ("token", "evidence"),
    [("1", Evidence("wrong")), (1.0, Evidence("wrong")), (1, None), (1, ["wrong"])],
)
def test_a_source_whose_candidates_are_none_ends_no_text(token, evidence, caplog):
    wrong = TextSource("wrong", lambda _text: [token])
    wrong.evidence = lambda _rank: evidence
    run = Run(MODEL, [[1, 2]], [omniscient(MODEL), wrong, NearMissesSource()])
    assert run.decode() == plain_text(run)
    assert run.stats.tokens_per_step > 2
    said = [text for each in caplog.records if "failed" in (text := each.getMessage())]
    assert len(said) == 1
    assert "'wrong' has failed, and drafts nothing more in this text" in said[0]


def test_an_error_of_a_calibration_is_its_own_and_no_sources():
    """One of a user's own may know some kinds of evidence alone."""
    spec = SelfSpec(calibration=FixedPrior(lambda evidence: {}["unknown"]), budget="fixed")
    with pytest.raises(KeyError, match="unknown"):
        attach(tiny_model()).generate(**prompt(), assistant=spec, max_new_tokens=24)
    assert spec.learned(len(tiny_model().lm_head.weight)).failed == set()
