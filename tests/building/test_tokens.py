"""Token ids in the order of the documents, whatever the number of workers."""

import numpy as np
import pytest

from selfspec.building import tokens
from selfspec.building.tokens import Encoder, encode_all
from selfspec.errors import BuildError

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


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_gives_the_same(tokenizer, texts, workers, monkeypatch):
    monkeypatch.setattr(tokens, "_CHUNK_DOCUMENTS", 2)
    documents = [*texts, None, [ASK, ANSWER], "x" * 99] * 2
    encoder = Encoder(tokenizer, chat_template=True)
    expected = encoder.encode(documents)
    got = list(encode_all(iter(documents), encoder, workers))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


def test_only_some_chunks_are_read_ahead(tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "_CHUNK_DOCUMENTS", 1)
    read = []

    def documents():
        for number in range(1000):
            read.append(number)
            yield str(number)

    stream = encode_all(documents(), Encoder(tokenizer, chat_template=True), 2)
    next(stream)
    assert len(read) < 10
    stream.close()


class Killed:
    """Ends the process that unpacks it, as the system does where memory runs out."""

    def __reduce__(self):
        import os

        return os._exit, (9,)


def test_a_worker_that_is_killed_is_said():
    with pytest.raises(BuildError, match=r"a worker process ended.*--workers"):
        list(encode_all(["x"], Killed(), 2))
