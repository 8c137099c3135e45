"""Token ids in the order of the documents."""

import numpy as np
import pytest

from selfspec.building.recipe import Recipe
from selfspec.building.tokens import encode, prefix_of, read_ids

ASK = {"role": "user", "content": "say a"}
ANSWER = {"role": "assistant", "content": "a"}
TALK = {"messages": "talk"}
PROMPTS = {"learn_from": "generations"}


@pytest.fixture
def decoded(tokenizer):
    """What documents come out as, as text again."""

    def texts(documents, **keys):
        found = encode(documents, Recipe.of(data="d", **keys), tokenizer)
        return [None if ids is None else tokenizer.decode(ids) for ids in found]

    return texts


def test_texts_and_ids_stand_for_themselves(decoded, tokenizer):
    ids = np.array(tokenizer("x y")["input_ids"])
    assert decoded(["ab\n", "", None, ids, "c d"]) == ["ab\n", None, None, "x y", "c d"]


def test_conversations_go_through_the_template(decoded):
    said = "<|user|>say a<|assistant|>a<|eos|>"
    assert decoded([[ASK, ANSWER], [], [ASK]], **TALK) == [said, None, "<|user|>say a"]
    assert decoded([[ASK, ANSWER]], **TALK, chat_template=False) == ["say a\n\na"]


def test_prompts_end_where_the_model_begins(decoded):
    ready = "<|user|>say a<|assistant|>"
    documents = [[ASK, ANSWER, ASK, ANSWER], "say a", [ANSWER, ASK], None]
    assert decoded(documents, **PROMPTS) == [ready, ready, None, None]
    plain = decoded(documents, **PROMPTS, chat_template=False)
    assert plain == ["say a", "say a", None, None]


def test_what_the_template_refuses_is_left_out(tokenizer, decoded, monkeypatch):
    template = "{% if messages|length > 1 %}{{ raise_exception('too many') }}{% endif %}ok"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert decoded([[ASK, ANSWER], [ASK]], **TALK) == [None, "ok"]


def test_special_tokens_come_once(tokenizer, monkeypatch):
    """The tokenizer adds them to a text, and a template writes its own."""
    asked = []
    real = type(tokenizer).__call__

    def call(self, texts, add_special_tokens=True, **more):
        asked.append((texts, add_special_tokens))
        return real(self, texts, add_special_tokens=add_special_tokens, **more)

    monkeypatch.setattr(type(tokenizer), "__call__", call)
    encode(["x"], Recipe.of(data="d"), tokenizer)
    encode([[ASK]], Recipe.of(data="d", **TALK), tokenizer)
    assert asked == [(["x"], True), (["<|user|>say a"], False)]


def test_documents_come_in_their_order(tokenizer, lines, texts):
    recipe = Recipe.of(data=str(lines), form="paragraph")
    assert [tokenizer.decode(ids) for ids in read_ids(recipe, tokenizer)] == texts


def test_the_vocabulary_and_what_stands_before_it(tokenizer):
    recipe = Recipe.of(data="vocabulary", build="lut")
    ids = [each.tolist() for each in read_ids(recipe, tokenizer)]
    assert ids == [[token] for token in range(len(tokenizer))]
    assert tokenizer.decode(prefix_of(recipe, tokenizer)) == "<|user|>Hello<|assistant|>"
    plain = Recipe.of(data="vocabulary", build="lut", chat_template=False)
    assert prefix_of(plain, tokenizer) == tokenizer("\n")["input_ids"]
    assert prefix_of(Recipe.of(data="d"), tokenizer) == []
