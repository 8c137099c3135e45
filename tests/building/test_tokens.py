"""Token ids in the order of the documents."""

import numpy as np
import pytest

from selfspec.building import tokens
from selfspec.building.tokens import Encoder, encode_all

ASK = {"role": "user", "content": "say a"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.fixture
def decoded(tokenizer):
    """What documents come out as, as text again."""

    def texts(documents, **how):
        encoder = Encoder(tokenizer, **{"chat_template": True, **how})
        return [None if ids is None else tokenizer.decode(ids) for ids in encoder.encode(documents)]

    return texts


def test_texts_stand_for_themselves(decoded):
    assert decoded(["ab\n", "", None, "c d"]) == ["ab\n", None, None, "c d"]


def test_conversations_go_through_the_template(decoded):
    said = "<|user|>say a<|assistant|>a<|eos|>"
    assert decoded([[ASK, ANSWER], "x", [], [ASK]]) == [said, "x", None, "<|user|>say a"]


def test_without_a_template_contents_stand_one_below_the_other(decoded):
    assert decoded([[ASK, ANSWER]], chat_template=False) == ["say a\n\na"]


def test_prompts_end_where_the_model_begins(decoded):
    ready = "<|user|>say a<|assistant|>"
    documents = [[ASK, ANSWER, ASK, ANSWER], "say a", [ANSWER, ASK], None]
    assert decoded(documents, prompts=True) == [ready, ready, None, None]
    plain = decoded(documents, prompts=True, chat_template=False)
    assert plain == ["say a", "say a", None, None]


def test_what_the_template_refuses_is_left_out(tokenizer, decoded, monkeypatch):
    template = "{% if messages|length > 1 %}{{ raise_exception('too many') }}{% endif %}ok"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert decoded([[ASK, ANSWER], [ASK]]) == [None, "ok"]


def test_special_tokens_come_once(tokenizer, monkeypatch):
    """The tokenizer adds them to a text, and a template writes its own."""
    asked = []
    real = type(tokenizer).__call__

    def call(self, texts, add_special_tokens=True, **more):
        asked.append((texts, add_special_tokens))
        return real(self, texts, add_special_tokens=add_special_tokens, **more)

    monkeypatch.setattr(type(tokenizer), "__call__", call)
    Encoder(tokenizer, chat_template=True).encode(["x", [ASK]])
    assert asked == [(["x"], True), (["<|user|>say a"], False)]


def test_documents_come_in_their_order_a_few_at_a_time(tokenizer, texts, monkeypatch):
    monkeypatch.setattr(tokens, "_PART_DOCUMENTS", 2)
    documents = [*texts, None, [ASK, ANSWER], "x" * 99]
    encoder = Encoder(tokenizer, chat_template=True)
    left = iter(documents)
    stream = encode_all(left, encoder)
    got = [next(stream)]
    assert next(left) == documents[2]
    expected = encoder.encode([*documents[:2], *documents[3:]])
    for one, other in zip([*got, *stream], expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)
