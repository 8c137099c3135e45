"""From memory to a file or the Hub and back, between models that share a tokenizer."""

import numpy as np
import pytest

import selfspec
from selfspec import CacheError, SelfSpec, VocabularyError
from selfspec.cache import CacheContents, load_cache, save_cache, tokenizer_info
from tests.caches import FakeTokenizer, plain
from tests.fakes import VOCAB, attached_model, lut_of, new_model, prompt

TOKENIZER = FakeTokenizer(VOCAB)


def write(spec, model=None, **options):
    model = attached_model() if model is None else model
    return model.generate(**prompt(), assistant=spec, max_new_tokens=24, **options)


@pytest.fixture
def learned() -> SelfSpec:
    spec = SelfSpec(max_nodes=8)
    write(spec)
    return spec


@pytest.fixture
def path(learned, tmp_path):
    learned.save_pretrained(tmp_path / "cache", tokenizer=TOKENIZER, about={"by": "a test"})
    return tmp_path / "cache.safetensors"


def test_what_was_learned_comes_back(learned, path):
    loaded = SelfSpec.from_pretrained(path, tokenizer=TOKENIZER, max_nodes=8)
    ours, theirs = lut_of(loaded), lut_of(learned)
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_array_equal(ours.probabilities, theirs.probabilities)
    assert loaded.learned(VOCAB).calibration.rows() == learned.learned(VOCAB).calibration.rows()
    assert plain(loaded._learned.contents(None, None)) == plain(load_cache(path))


def test_saved_loaded_and_saved_is_the_same_file(path, tmp_path):
    """Before the first use and after a look at the memory."""
    untouched, looked_at = SelfSpec.from_pretrained(path), SelfSpec.from_pretrained(path)
    looked_at.learned(VOCAB)
    for name, spec in (("one", untouched), ("other", looked_at)):
        spec.save_pretrained(tmp_path / name)
        assert (tmp_path / f"{name}.safetensors").read_bytes() == path.read_bytes()


def test_saving_needs_to_know_the_tokenizer(learned, path, tmp_path):
    with pytest.raises(CacheError, match="tokenizer="):
        learned.save_pretrained(tmp_path / "other")
    loaded = SelfSpec.from_pretrained(path)
    loaded.save_pretrained(tmp_path / "other", tokenizer=TOKENIZER)
    with pytest.raises(CacheError, match="another"):
        loaded.save_pretrained(tmp_path / "third", tokenizer=FakeTokenizer(VOCAB + 1))


def test_forgetting_goes_back_to_what_was_loaded(path):
    spec = SelfSpec.from_pretrained(path)
    write(spec, do_sample=True)
    assert plain(spec._learned.contents(None, None)) != plain(load_cache(path))
    spec.forget()
    spec.learned(VOCAB)
    assert plain(spec._learned.contents(None, None)) == plain(load_cache(path))


def test_the_texts_of_a_cache_draft_and_are_saved_along(tmp_path):
    stock = write(None)
    answers = np.append(stock[0].numpy(), -1).astype(np.int32)
    held = CacheContents(tokenizer=tokenizer_info(TOKENIZER), answers=answers)
    save_cache(tmp_path / "cache", held)
    spec = SelfSpec.from_pretrained(tmp_path / "cache", sources=("answers", "lut"))
    assert write(spec).tolist() == stock.tolist()
    assert spec.stats.accepted_by_source["answers"] > 0
    assert spec.stats.tokens_per_step > 2
    spec.save_pretrained(tmp_path / "more", about={"by": "another"})
    more = load_cache(tmp_path / "more")
    assert more.answers.tolist()[: len(answers)] == answers.tolist()
    assert (set(more.tables), more.about) == ({"lut"}, {"by": "another"})


class TestVocabulary:
    def test_models_that_share_a_tokenizer_share_a_cache(self, path):
        """Their logits may be padded wider than the vocabulary, each in its own way."""
        wide = selfspec.attach(new_model(vocab_size=VOCAB + 64))
        for model, width in ((attached_model(), VOCAB), (wide, VOCAB + 64)):
            spec = SelfSpec.from_pretrained(path, tokenizer=TOKENIZER)
            assert write(spec, model).tolist() == write(None, model).tolist()
            assert len(lut_of(spec, width).token_ids) == width

    def test_a_model_without_the_ids_is_refused_at_first_use(self, path):
        narrow = selfspec.attach(new_model(vocab_size=VOCAB // 2))
        spec = SelfSpec.from_pretrained(path)
        with pytest.raises(VocabularyError, match="token ids"):
            spec.learned(VOCAB // 2)
        inputs = {k: v.clamp(max=VOCAB // 2 - 1) for k, v in prompt().items()}
        with pytest.raises(VocabularyError):
            narrow.generate(**inputs, assistant=spec, max_new_tokens=4)
        write(spec)  # and stays of use for others
