"""`generate_batch()` of an attached model beside transformers' own continuous batching."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from selfspec import SelfSpec, UnsupportedError, attach, detach
from tests.fakes import new_model

PROMPTS = [[5, 6, 7, 8, 5, 6], [5, 6, 7, 9], [11, 12, 13, 11, 12]]
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=3, pad_token_id=0)


def tokens(outputs):
    return [output.generated_tokens for output in outputs.values()]


def test_greedy_answers_are_those_of_transformers():
    model = new_model()
    theirs = model.generate_batch(PROMPTS, generation_config=GREEDY)
    spec = SelfSpec()
    ours = attach(model, spec).generate_batch(PROMPTS, generation_config=GREEDY)
    assert tokens(ours) == tokens(theirs)
    assert list(ours) == list(theirs)
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        assert (mine.prompt_ids, mine.error) == (other.prompt_ids, None)
        assert mine.is_finished()
    assert spec.total_stats.num_calls == len(PROMPTS)


def test_several_texts_of_a_prompt_have_the_names_that_transformers_gives():
    model = new_model()
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    config = GenerationConfig(**{**GREEDY.to_diff_dict(), **options})
    theirs = model.generate_batch(PROMPTS[:2], generation_config=config)
    ours = attach(model, SelfSpec()).generate_batch(PROMPTS[:2], generation_config=config)
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
def test_what_only_transformers_can_do_is_its_own_call(options, reason, caplog):
    model, spec = new_model(), SelfSpec()
    theirs = model.generate_batch(PROMPTS, generation_config=GREEDY, **options)
    attach(model, spec)
    ours = model.generate_batch(PROMPTS, generation_config=GREEDY, **options)
    assert tokens(ours) == tokens(theirs)
    assert reason in caplog.text
    assert not spec.total_stats.num_calls
    with pytest.raises(UnsupportedError, match=reason):
        model.generate_batch(PROMPTS, generation_config=GREEDY, assistant=spec, **options)


def test_without_a_default_assistant_and_after_detach_it_is_transformers_own():
    model, spec = attach(new_model()), SelfSpec()
    model.generate_batch(PROMPTS, generation_config=GREEDY)
    model.generate_batch(PROMPTS, generation_config=GREEDY, assistant=spec)
    assert spec.total_stats.num_calls == len(PROMPTS)
    attach(model, spec)
    model.generate_batch(PROMPTS, generation_config=GREEDY, assistant=None)
    assert "generate_batch" not in vars(detach(model))
    assert spec.total_stats.num_calls == len(PROMPTS)
