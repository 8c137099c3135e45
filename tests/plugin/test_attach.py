"""A default assistant drafts in calls that name none, and breaks nobody's code."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from selfspec import (
    CacheError,
    LutRecorder,
    SelfSpec,
    SelfSpecCandidateGenerator,
    SelfSpecError,
    UnsupportedError,
    VocabularyError,
    attach,
    detach,
    generate_many,
    load,
)
from selfspec.plugin.attach import _ATTACHMENT, Attachment
from selfspec.plugin.refusals import RULES, Consequence, Rule
from tests.fakes import (
    VOCAB,
    FutureSource,
    new_model,
    prompt,
    tiny_model,
    tiny_tokenizer,
)
from tests.lossless.same import (
    CALLS,
    GREEDY,
    NUM_COLUMNS,
    NUM_NEW,
    SAMPLE,
    Call,
    assert_same_ids,
    doubting,
    recorded_forwards,
    run,
    texts_of,
)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_drafts_until_it_is_switched_off(call: Call) -> None:
    model, inputs = new_model(), call.inputs
    before = dict(vars(model))
    stock = run(model, inputs, **call.options)
    spec = doubting(stock.ids, inputs)
    assert attach(attach(model, spec)) is model  # The second one leaves the default alone.
    ours = run(model, inputs, **call.options)
    assert_same_ids(ours.ids, stock.ids)
    assert torch.equal(ours.rng_state, stock.rng_state)
    assert spec.stats.tokens_per_step > 1.2
    with recorded_forwards(model) as widths:
        off = run(model, inputs, assistant=None, **call.options)
    assert_same_ids(off.ids, stock.ids)
    assert set(widths[1:]) == {1}
    other = SelfSpec()
    assert_same_ids(run(model, inputs, assistant=other, **call.options).ids, stock.ids)
    assert (spec.total_stats.num_calls, other.total_stats.num_calls) == (1, 1)
    assert vars(detach(model)) == before
    run(model, inputs, **call.options)
    assert spec.total_stats.num_calls == 1


LEFT_TO_STOCK: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3, "num_return_sequences": 2}, "beam search"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 5}, "prompt lookup"),
    "another-model": ({"assistant_model": tiny_model()}, "assistant_model="),
    "in-the-config": (
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=12, pad_token_id=0)},
        "beam search",
    ),
}


@pytest.mark.parametrize(("options", "reason"), LEFT_TO_STOCK.values(), ids=LEFT_TO_STOCK)
def test_what_it_can_not_serve_is_stocks(options: dict[str, Any], reason: str, caplog: Any) -> None:
    model, inputs, spec = new_model(), prompt(), SelfSpec()
    length = {} if "generation_config" in options else {"max_new_tokens": 12, **GREEDY}
    stock = model.generate(**inputs, **options, **length)
    attach(model, spec)
    for _ in range(2):
        ours = model.generate(**inputs, prediction=[5, 6, 7], **options, **length)
        assert_same_ids(ours, stock)
    assert spec.total_stats.num_calls == 0
    (record,) = [each for each in caplog.records if each.name == "selfspec"]
    assert record.levelname == "WARNING"
    assert reason in record.getMessage()


def test_what_the_models_own_config_asks_for_is_stocks() -> None:
    model, inputs, spec = new_model(), prompt(), SelfSpec()
    model.generation_config.num_beams = 3
    stock = run(model, inputs, **GREEDY)
    assert_same_ids(run(attach(model, spec), inputs, **GREEDY).ids, stock.ids)
    assert spec.total_stats.num_calls == 0
    run(model, inputs, num_beams=1, **GREEDY)  # The argument goes before the config.
    assert spec.total_stats.num_calls == 1


def test_processes_that_may_have_to_keep_step_are_stocks(monkeypatch: Any, caplog: Any) -> None:
    """Ranks that share a model wait for each other in every forward, and would draft apart."""
    monkeypatch.setattr("selfspec.plugin.refusals._num_processes", lambda: 2)
    spec = SelfSpec()
    run(attach(new_model(), spec), prompt(), **GREEDY)
    assert spec.total_stats.num_calls == 0
    assert "run their forwards in step" in caplog.text


def test_a_class_with_a_generate_of_its_own_is_left_alone(caplog: Any) -> None:
    model = new_model()
    seen: list[tuple[Any, ...]] = []

    class Own(type(model)):  # type: ignore[misc]
        def generate(self, text: Any, **kwargs: Any) -> str:
            seen.append((text, kwargs))
            return "said"

    model.__class__ = Own
    attach(model, SelfSpec())
    assert model.generate("a", speed=2) == "said"
    assert seen == [("a", {"speed": 2})]
    assert "has a generate() of its own" in caplog.text


def test_another_loop_that_is_asked_for_goes_first(caplog: Any) -> None:
    model, default, named = new_model(), SelfSpec(), SelfSpec()
    run(attach(model, default), prompt(), custom_generate=named, **GREEDY)
    assert (default.total_stats.num_calls, named.total_stats.num_calls) == (0, 1)
    assert not caplog.records


def test_positional_arguments_and_stop_strings() -> None:
    """transformers drops the tokenizer on the way to a loop of ours."""
    model, inputs, tokenizer = new_model("olmo2"), prompt(), tiny_tokenizer()
    text = tokenizer.decode(run(model, inputs, **GREEDY).ids[0, 17:])
    config = GenerationConfig(stop_strings=[text[6:9]], max_new_tokens=24, pad_token_id=0)
    options = {"attention_mask": inputs["attention_mask"], "tokenizer": tokenizer}
    stock = model.generate(inputs["input_ids"], config, **options)
    spec = SelfSpec()
    ours = attach(model, spec).generate(inputs["input_ids"], config, **options)
    assert_same_ids(ours, stock)
    assert ours.shape[1] < 17 + 24
    assert spec.total_stats.num_calls == 1


def test_copies_share_the_default_and_pickles_have_none() -> None:
    spec = SelfSpec()
    model = attach(new_model(), spec)
    stock = run(model, prompt(), assistant=None, **SAMPLE)
    assert_same_ids(run(copy.deepcopy(model), prompt(), **SAMPLE).ids, stock.ids)
    assert spec.total_stats.num_calls == 1
    read = pickle.loads(pickle.dumps(model))
    assert_same_ids(run(read, prompt(), **SAMPLE).ids, stock.ids)
    assert spec.total_stats.num_calls == 1
    attach(read, spec)
    assert_same_ids(run(read, prompt(), **SAMPLE).ids, stock.ids)
    assert spec.total_stats.num_calls == 2
    assert vars(detach(read)).keys() == vars(detach(model)).keys()


def test_a_criterion_of_the_callers_names_the_length() -> None:
    model, inputs = new_model("llama"), prompt()
    (text,) = texts_of(run(model, inputs, **GREEDY).ids, inputs)
    criteria = StoppingCriteriaList([MaxLengthCriteria(NUM_COLUMNS + 7)])
    stock = run(model, inputs, stopping_criteria=criteria, **GREEDY)
    spec = SelfSpec(extra_sources=[FutureSource([text])])
    options = {"stopping_criteria": criteria, **GREEDY}
    ids = SelfSpecCandidateGenerator(spec).generate(model, **inputs, **options, max_new_tokens=20)
    assert_same_ids(ids, stock.ids)


def test_a_criterion_beyond_the_config_is_refused_since_stock_would_never_end() -> None:
    model, inputs = new_model("llama"), prompt()
    criteria = [MaxLengthCriteria(NUM_COLUMNS + 8)]
    options = {"max_new_tokens": 7, "stopping_criteria": criteria, "do_sample": False}
    with pytest.raises(UnsupportedError, match="MaxLengthCriteria"):
        SelfSpecCandidateGenerator(SelfSpec()).generate(model, **inputs, **options)


def test_nothing_of_a_call_waits_for_the_garbage_collector() -> None:
    """Neither its KV nor the `SelfSpec`, which saves what it remembers once it is gone."""
    model, spec = attach(new_model()), SelfSpec()
    gone = weakref.ref(spec)
    gc.disable()
    try:
        run(model, prompt(), assistant=spec, **GREEDY)
        del spec
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda m: SelfSpec(m), "(got a LlamaForCausalLM); knobs go by name"),
        (lambda m: attach("gpt2"), "(got 'gpt2'); load a model"),
        (lambda m: attach(SelfSpec(), m), "(got a SelfSpec); load a model"),
        (lambda m: attach(m, m), "assistant must be a SelfSpec (got a LlamaForCausalLM); make one"),
        (lambda m: m.generate(**prompt(), assistant_model=SelfSpec()), "call selfspec.attach("),
        (lambda m: load(m), "(got a LlamaForCausalLM); a model that is loaded needs no load()"),
        (lambda m: load("x", torch_dtype="auto"), "takes no torch_dtype= (got 'auto'); use dtype="),
        (lambda m: load("x", device_map="auto"), "use device="),
        (lambda m: load("x", load_in_4bit=True), "use weights='int4'"),
        (lambda m: load("x", dtpe="auto"), "did you mean 'dtype'?"),
        (lambda m: SelfSpec(extra_sources=["lut"]), "sources of your own (got 'lut'); "),
        (lambda m: SelfSpec(remember="x", tokenizer="gpt2"), "tokenizer must be the model's"),
        (lambda m: generate_many(m, "gpt2", ["x"]), "tokenizer must be the model's tokenizer"),
        (lambda m: generate_many(tiny_tokenizer(), m, ["x"]), "tokenizer and prompts come after"),
        (lambda m: generate_many(m, tiny_tokenizer(), 5), "must be a list of prompts (got 5)"),
        (lambda m: generate_many(m, tiny_tokenizer(), [], seed="a"), "seed must be a whole number"),
        (lambda m: generate_many(m, tiny_tokenizer(), [], logprobs=-1), "logprobs must be a whole"),
        (lambda m: generate_many(m, tiny_tokenizer(), [], scheduler="x"), "a method turn()"),
        (lambda m: load("./nowhere"), "name must be a folder with a config.json, or a Hub id"),
        (lambda m: load("x", "2GB", max_length="9"), "max_length must be a whole number"),
        (lambda m: SelfSpec.from_pretrained(""), "named by its file or its Hub id (got '')"),
        (lambda m: SelfSpec(remember=3, tokenizer=tiny_tokenizer()), "named by its file"),
        (LutRecorder, "assistant must be a SelfSpec (got a LlamaForCausalLM); make one"),
        (SelfSpecCandidateGenerator, "assistant must be a SelfSpec (got a LlamaForCausalLM)"),
        (lambda m: SelfSpec(contents="x"), "contents must be what load_cache()"),
        (lambda m: SelfSpec.as_in("DIAA"), "did you mean 'diaa'?"),
        (lambda m: SelfSpec.as_in("diaa", taus=1), "did you mean 'tau'?"),
        (lambda m: SelfSpec.as_in("self-draft", corpus="texts"), "must be a CorpusCache"),
        (lambda m: SelfSpec.from_pretrained(__file__), "ends with .safetensors (got"),
    ],
)
def test_typical_mistakes_are_one_sentence(mistake: Any, sentence: str) -> None:
    with pytest.raises(SelfSpecError) as caught:
        mistake(tiny_model())
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_folder_of_a_model_is_no_cache(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(CacheError, match="is the folder of a model, and no cache; to draft for it"):
        SelfSpec.from_pretrained(tmp_path)


def test_what_somebody_puts_around_an_attached_generate_stays() -> None:
    model, lengths = attach(new_model("llama"), SelfSpec()), []
    inside = model.generate

    def around(*args: Any, **kwargs: Any) -> Any:
        lengths.append(kwargs["max_new_tokens"])
        return inside(*args, **kwargs)

    model.generate = around
    spec = SelfSpec()
    attach(model, spec).generate(**prompt(), max_new_tokens=5)
    assert lengths == [5]
    assert spec.stats.num_calls == 1
    detach(model).generate(**prompt(), max_new_tokens=6)
    assert lengths == [5, 6]
    assert spec.total_stats.num_calls == 1
    attach(model, spec).generate(**prompt(), max_new_tokens=7)
    assert lengths == [5, 6, 7]
    assert spec.total_stats.num_calls == 2
    model.generate = inside
    assert "generate" not in vars(detach(model))


class Found:
    """A wrapper that has `generate` from the model inside, as its class has none."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@pytest.mark.parametrize("named", [True, False])
def test_a_wrapper_that_finds_generate_elsewhere(named: bool) -> None:
    spec, stock = SelfSpec(), run(new_model(), prompt(), **GREEDY).ids
    wrapper = attach(Found(new_model()), None if named else spec)
    options = {"assistant": spec} if named else {}
    ids = wrapper.generate(**prompt(), max_new_tokens=NUM_NEW, **GREEDY, **options)
    assert_same_ids(ids, stock)
    assert spec.total_stats.num_calls == named


def test_a_call_goes_on_although_another_thread_has_detached_the_model() -> None:
    model, spec = attach(new_model()), SelfSpec()
    generate = model.generate  # As the other thread has looked it up.
    stock = run(detach(model), prompt(), **GREEDY).ids
    ids = generate(**prompt(), assistant=spec, max_new_tokens=NUM_NEW, **GREEDY)
    assert_same_ids(ids, stock)
    assert spec.total_stats.num_calls == 1


def test_a_default_steps_aside_for_another_vocabulary(caplog: Any) -> None:
    spec = SelfSpec()
    model, other = attach(new_model(), spec), attach(new_model(vocab_size=VOCAB + 7), spec)
    run(model, prompt(), **GREEDY)
    stock = run(other, prompt(), assistant=None, **SAMPLE)
    for _ in range(2):
        assert_same_ids(run(other, prompt(), **SAMPLE).ids, stock.ids)
    (record,) = [each for each in caplog.records if each.name == "selfspec"]
    assert f"a vocabulary of {VOCAB} tokens" in record.getMessage()
    with pytest.raises(VocabularyError):
        run(other, prompt(), assistant=spec, **GREEDY)
    run(model, prompt(), **GREEDY)
    assert spec.stats.disabled_reason is None


def test_a_default_steps_aside_for_a_memory_that_was_damaged(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "memory.safetensors"
    spec = SelfSpec(remember=file, tokenizer=tiny_tokenizer())
    file.write_bytes(b"no cache")
    model = attach(new_model(), spec)
    stock = run(model, prompt(), assistant=None, **SAMPLE)
    for _ in range(2):
        assert_same_ids(run(model, prompt(), **SAMPLE).ids, stock.ids)
    assert caplog.text.count("memory.safetensors") == 1
    with pytest.raises(CacheError):
        run(model, prompt(), assistant=spec, **GREEDY)


class EndsFirst(StoppingCriteria):
    """Ends the first row after two tokens, and the others never."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_more: Any) -> torch.Tensor:
        ends = torch.zeros(len(input_ids), dtype=torch.bool)
        ends[0] = input_ids.shape[1] >= NUM_COLUMNS + 2
        return ends


def test_pads_of_a_plain_call_are_no_tokens() -> None:
    model, spec, rows = new_model(), SelfSpec(), prompt(3)
    options = {"stopping_criteria": StoppingCriteriaList([EndsFirst()]), **GREEDY}
    options |= {"max_new_tokens": 6, "pad_token_id": 0}
    stock = run(model, rows, **options)
    plain = run(attach(model), rows, assistant=spec, cache_implementation="static", **options)
    assert_same_ids(plain.ids, stock.ids)
    assert spec.stats.mode == "plain"
    counted = (spec.stats.num_new_tokens, spec.stats.num_steps, spec.stats.num_prompt_tokens_out)
    assert counted == (2 + 6 + 6, 1 + 5 + 5, 3)


@pytest.mark.parametrize("named", [True, False])
def test_what_is_refused_is_asked_once(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(RULES, Consequence.REFUSED, (Rule(asked.append),))
    spec = SelfSpec()
    model = attach(new_model(), None if named else spec)
    model.generate(**prompt(), max_new_tokens=2, **({"assistant": spec} if named else {}))
    assert len(asked) == 1


def test_threads_that_attach_one_model_take_no_method_of_ours_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second thread comes while the first one has its method on the model already."""
    attach_module = sys.modules[attach.__module__]
    model, second = new_model(), list[threading.Thread]()

    class Waits(Attachment):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not second:
                second.append(threading.Thread(target=attach, args=(model,)))
                second[0].start()

    monkeypatch.setattr(attach_module, "Attachment", Waits)
    attach(model)
    second[0].join()
    assert vars(model)[_ATTACHMENT].method is None
