"""`generate_batch()` of an attached model beside transformers' own continuous batching."""

from importlib import import_module

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from selfspec import SelfSpec, UnsupportedError, attach, detach
from tests.fakes import new_model

door = import_module("selfspec.plugin.attach")
PROMPTS = [[5, 6, 7, 8, 5, 6], [5, 6, 7, 9], [11, 12, 13, 11, 12]]
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=3, pad_token_id=0)


@pytest.fixture
def transformers_own(monkeypatch):
    """What transformers' own call returns here, which takes seconds otherwise."""
    of_class = door._of_class

    def stub(model, name):
        return (lambda *_, **__: "its own") if name == "generate_batch" else of_class(model, name)

    monkeypatch.setattr(door, "_of_class", stub)
    return "its own"


def tokens(outputs):
    return [output.generated_tokens for output in outputs.values()]


def test_answers_are_those_of_generate():
    model = new_model()
    expected = [model.generate(torch.tensor([ids]), generation_config=GREEDY) for ids in PROMPTS]
    spec = SelfSpec()
    outputs = attach(model, spec).generate_batch(PROMPTS, generation_config=GREEDY)
    for ids, whole, output in zip(PROMPTS, expected, outputs.values(), strict=True):
        assert output.prompt_ids + output.generated_tokens == whole[0].tolist()
        assert output.prompt_ids == ids
        assert output.is_finished()
        assert output.error is None
    assert spec.total_stats.num_calls == len(PROMPTS)


@pytest.mark.slow  # Continuous batching takes half a minute to begin and to end.
def test_tokens_names_and_order_are_those_of_transformers():
    """Drawn from one token each, so that nothing depends on random numbers."""
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    config = GenerationConfig(**{**GREEDY.to_diff_dict(), **options})
    model = new_model()
    theirs = model.generate_batch(PROMPTS, generation_config=config)
    ours = attach(model, SelfSpec()).generate_batch(PROMPTS, generation_config=config)
    assert list(ours) == list(theirs)
    assert tokens(ours) == tokens(theirs)


def test_sampled_answers_follow_torchs_seed():
    model = attach(new_model(), SelfSpec())
    config = GenerationConfig(max_new_tokens=12, do_sample=True, eos_token_id=3, pad_token_id=0)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(tokens(model.generate_batch(PROMPTS, generation_config=config)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_limit_may_be_an_argument_and_a_model_in_training_is_answered():
    model = attach(new_model(), SelfSpec()).train()
    outputs = model.generate_batch(PROMPTS, max_new_tokens=5, progress_bar=True)
    assert [len(ids) for ids in tokens(outputs)] == [5, 5, 5]
    assert not model.training  # As transformers leaves it.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"record_timestamps": True}, "the time of each token"),
        (
            {"continuous_batching_config": ContinuousBatchingConfig(return_logprobs=True)},
            "log prob",
        ),
    ],
)
def test_what_only_transformers_can_do_is_its_own_call(options, reason, caplog, transformers_own):
    spec = SelfSpec()
    model = attach(new_model(), spec)
    assert model.generate_batch(PROMPTS, generation_config=GREEDY, **options) == transformers_own
    assert reason in caplog.text
    with pytest.raises(UnsupportedError, match=reason):
        model.generate_batch(PROMPTS, generation_config=GREEDY, assistant=spec, **options)
    assert not spec.total_stats.num_calls


def test_without_an_assistant_it_is_transformers_own_call(transformers_own):
    model, spec = attach(new_model()), SelfSpec()
    assert model.generate_batch(PROMPTS) == transformers_own
    model.generate_batch(PROMPTS, generation_config=GREEDY, assistant=spec)
    assert spec.total_stats.num_calls == len(PROMPTS)
    attach(model, spec)
    assert model.generate_batch(PROMPTS, assistant=None) == transformers_own
    assert "generate_batch" not in vars(detach(model))
