"""Text that comes token by token is the text that comes at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from selfspec.batch.text_stream import TextStream
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()


def pieces(tokenizer, ids, prompt_ids=()):
    stream = TextStream(tokenizer, prompt_ids)
    return [*(stream.add(i) for i in ids), stream.rest()]


# no text that spells a special token: that would be encoded as one, which is not shown
TEXTS = st.text(max_size=40).filter(lambda text: "<|" not in text)


@given(TEXTS, TEXTS)
def test_text_comes_whole_and_no_character_in_parts(text, prompt):
    ids = TOKENIZER(text)["input_ids"]
    got = pieces(TOKENIZER, ids, TOKENIZER(prompt)["input_ids"])
    assert "".join(got) == text
    assert all("\ufffd" not in piece for piece in got) or "\ufffd" in text


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_tokens_come_out_as_decoded_at_once(ids):
    expected = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(TOKENIZER, ids)) == expected


@pytest.fixture(scope="module")
def spaced():
    """Decodes as SentencePiece does: a first word loses the space in front of it."""
    vocabulary = {"▁a": 0, "▁b": 1, "</s>": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_spaces_between_words_survive_and_special_tokens_are_left_out(spaced):
    assert "".join(pieces(spaced, [0, 1, 0])) == spaced.decode([0, 1, 0]) == "a b a"
    assert "".join(pieces(spaced, [0, 1], prompt_ids=[1])) == " a b"
    assert "".join(pieces(spaced, [0, 2, 1])) == "a b"
