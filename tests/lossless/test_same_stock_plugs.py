"""Our parts inside transformers' own loops: a candidate generator, and a recorder of LUTs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from selfspec import LutRecorder, SelfSpec, SelfSpecCandidateGenerator, UnsupportedError
from tests.fakes import VOCAB, FutureSource, lut_of, new_model, prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import (
    GREEDY,
    NUM_COLUMNS,
    NUM_NEW,
    Call,
    assert_clean,
    assert_same_ids,
    doubting,
    in_threads,
    recorded_forwards,
    run,
    slow,
    texts_of,
)
from tests.lossless.test_same_streamers import Recorder


def assisted(model: Any, spec: SelfSpec, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """The ids of stock's assisted decoding with our drafts, which leaves the model as it was."""
    options = {"max_new_tokens": NUM_NEW, **options}
    ids = SelfSpecCandidateGenerator(spec).generate(model, **inputs, **options)
    assert_clean(model)
    return ids  # type: ignore[no-any-return]


@pytest.mark.parametrize(("doubt", "eos"), [(True, None), (False, 15), slow(True, 15)])
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3", slow("gpt2"), slow("llama4"), slow("olmo2")]
)
def test_candidate_generator_in_stock_assisted_decoding(
    name: str, eos: int | None, doubt: bool
) -> None:
    model, inputs = new_model(name), prompt()
    options = GREEDY | {"eos_token_id": eos}
    stock = run(model, inputs, **options)
    spec = doubting(stock.ids, inputs) if doubt else SelfSpec()
    for _ in range(2):
        with recorded_forwards(model) as widths:
            assert_same_ids(assisted(model, spec, inputs, **options), stock.ids)
    if doubt:
        assert len(widths) <= stock.ids.shape[1] - NUM_COLUMNS


@pytest.mark.parametrize("num_new", [2, 7, 20])
def test_candidate_generator_stays_within_the_models_positions(num_new: int) -> None:
    """No draft reaches beyond the last token, where the model may have no position."""
    model, inputs = new_model("gpt2", n_positions=NUM_COLUMNS + num_new), prompt()
    options = GREEDY | {"max_new_tokens": num_new}
    stock = run(model, inputs, **options)
    (text,) = texts_of(stock.ids, inputs)
    spec = SelfSpec(extra_sources=[FutureSource([[*text, *[5] * 20]])])
    assert_same_ids(assisted(model, spec, inputs, **options), stock.ids)


def test_candidate_generator_takes_no_embeddings_alone() -> None:
    """Stock's assisted decoding writes another text from them with transformers 5.17."""
    model, inputs = new_model("llama"), prompt()
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    with pytest.raises(UnsupportedError, match="come with their input_ids"):
        assisted(model, SelfSpec(), {"inputs_embeds": embeds}, **GREEDY)


def test_candidate_generator_serves_several_threads_beside_stock() -> None:
    """Nothing of the model is replaced meanwhile, so that another thread's call is its own."""
    model, spec = new_model("llama"), SelfSpec()
    candidates = SelfSpecCandidateGenerator(spec)
    inputs = [prompt(seed=seed) for seed in range(6)]
    stock = [run(model, each, **GREEDY).ids for each in inputs]

    def call(index: int) -> None:
        generate = partial(candidates.generate, model) if index % 2 else model.generate
        ids = generate(**inputs[index], max_new_tokens=NUM_NEW, **GREEDY)
        assert_same_ids(ids, stock[index])

    in_threads(call, len(inputs), 3)


def test_candidate_generator_has_a_streamer_stop_strings_and_one_row() -> None:
    model, inputs, tokenizer = new_model("llama"), prompt(), tiny_tokenizer()
    stock, streamer = run(model, inputs, **GREEDY).ids, Recorder()
    ids = assisted(model, SelfSpec(), inputs, streamer=streamer, **GREEDY)
    assert_same_ids(ids, stock)
    *told, end = streamer.told
    values = [torch.tensor(values).flatten() for *_, values in told]
    assert torch.equal(torch.cat(values), stock[0])
    assert end == "end"
    word = tokenizer.decode(stock[0, NUM_COLUMNS + 4])
    options = {"stop_strings": [word], "tokenizer": tokenizer, **GREEDY}
    ids = assisted(model, SelfSpec(), inputs, **options)
    assert_same_ids(ids, run(model, inputs, **options).ids)
    assert ids.shape[1] < stock.shape[1]
    with pytest.raises(ValueError, match="batch_size = 1"):
        assisted(model, SelfSpec(), prompt(2), **GREEDY)
    with pytest.raises(ValueError, match="num_return_sequences"):
        assisted(model, SelfSpec(), prompt(), do_sample=True, num_return_sequences=2)


@pytest.mark.parametrize("is_own", [True, False])
def test_candidate_generator_asks_the_draft_model(is_own: bool) -> None:
    """The `SelfSpec`'s own, or the one that a call names: here one that knows the text."""
    model, inputs, twin = new_model("llama"), prompt(), tiny_model("llama")
    stock = run(twin, inputs, **GREEDY)
    spec = SelfSpec(sources=(), draft_model=twin if is_own else None)
    more = {} if is_own else {"assistant_model": twin}
    with recorded_forwards(model) as widths:
        for _ in range(2):
            assert_same_ids(assisted(model, spec, inputs, **more, **GREEDY), stock.ids)
    num_new = stock.ids.shape[1] - inputs["input_ids"].shape[1]
    assert 2 * num_new > 4 * len(widths)


@pytest.mark.parametrize("learning", ["session", "request", "frozen"])
def test_candidate_generator_learns_how_far_guesses_can_be_trusted(learning: str) -> None:
    """As the learning scope says: in a session, right guesses are surer in the end."""
    model, inputs = new_model("qwen2"), prompt()
    stock = run(model, inputs, **GREEDY)
    source = FutureSource(texts_of(stock.ids, inputs), doubt=0.3)
    spec = SelfSpec(extra_sources=[source], learning=learning)
    assert_same_ids(assisted(model, spec, inputs, **GREEDY), stock.ids)
    memory = spec.learned(VOCAB)
    rates = memory.calibration.rows()
    num_right = sum(hits for kinds, hits, _ in rates if [kind[0] for kind in kinds] == ["future"])
    assert bool(rates) == (learning == "session")
    assert (lut_of(spec).token_ids >= 0).any() == (learning == "session")
    if learning == "session":
        assert num_right > 5


def expected_lut(output: Any, inputs: dict[str, torch.Tensor], top_k: int) -> dict[int, list[int]]:
    """For each token that was a last one: the top-K of the raw scores of its latest call."""
    table: dict[int, list[int]] = {}
    for step, logits in enumerate(output.logits):
        last = output.sequences[:, NUM_COLUMNS + step - 1].tolist()
        for token, row in zip(last, logits, strict=True):
            table[token] = row.topk(top_k).indices.tolist()
    return table


def test_recorder_in_stock_generate(call: Call) -> None:
    model, inputs, spec = tiny_model("mistral"), call.inputs, SelfSpec()
    options = call.options | {"return_dict_in_generate": True, "output_logits": True}
    stock = run(model, inputs, **options)
    recorded = run(model, inputs, logits_processor=[LutRecorder(spec)], **options)
    assert_same_ids(recorded.ids, stock.ids)
    assert torch.equal(recorded.rng_state, stock.rng_state)
    lut = lut_of(spec, VOCAB)
    table = expected_lut(stock.output, inputs, spec.config.top_k)
    for token in range(VOCAB):
        expected = table.get(token, [-1] * spec.config.top_k)
        assert lut.token_ids[token].tolist() == expected
    spoken = np.array(sorted(table))
    assert (lut.probabilities[spoken].sum(-1) <= 1.01).all()
    assert (np.diff(lut.probabilities[spoken].astype(np.float32), axis=-1) <= 0).all()


@pytest.mark.parametrize("learning", ["request", "frozen"])
def test_recorder_leaves_what_is_learned_to_the_learning_scope(learning: str) -> None:
    spec = SelfSpec(learning=learning)
    run(tiny_model(), prompt(), logits_processor=[LutRecorder(spec)], **GREEDY)
    assert (lut_of(spec, VOCAB).token_ids == -1).all()
