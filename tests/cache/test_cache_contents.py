"""A tokenizer is known by its vocabulary, and ids are counted wherever they stand."""

import pytest

from selfspec.cache import tokenizer_info
from tests.caches import FakeTokenizer, contents, count_grams, lut, lut2


def test_its_vocabulary_is_its_fingerprint():
    one, same = tokenizer_info(FakeTokenizer()), tokenizer_info(FakeTokenizer(name="other/one"))
    turned = FakeTokenizer()
    turned.vocab = dict(reversed(turned.vocab.items()))
    assert one.fingerprint == same.fingerprint == tokenizer_info(turned).fingerprint
    assert one.vocab_size == 50
    turned.vocab["token 7"], turned.vocab["token 8"] = 8, 7
    assert one.fingerprint != tokenizer_info(turned).fingerprint
    assert tokenizer_info(one) is one


@pytest.mark.parametrize("name", ["/home/me/models/mine", "C:\\models\\mine", "mine"])
def test_paths_are_nobodys_business(name):
    assert tokenizer_info(FakeTokenizer(name=name)).name == "mine"
    assert tokenizer_info(FakeTokenizer(name="owner/mine")).name == "owner/mine"


@pytest.mark.parametrize(
    "changes",
    [
        {"tables": {"lut": lut([1, 40])}},
        {"tables": {"lut2": lut2([(40, 1)])}},
        {"tables": {"lut": {**lut(), "ids": lut()["ids"] * 0 + 40}}},
        {"corpus": count_grams([3, 1, 40, 1])},
        {"corpus": count_grams([3, 1, 4, 40])},
    ],
)
def test_ids_are_counted_in_every_table(changes):
    assert contents(**{"tables": {}, "corpus": None, **changes}).count_ids() == 41
