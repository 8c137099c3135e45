"""A whole build, from texts and from what the model says."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from selfspec import SelfSpec
from selfspec.building import build as module
from selfspec.building.grams import GramCounter
from selfspec.building.limits import vocab_size
from selfspec.building.reading import teach
from selfspec.building.recipe import Recipe
from selfspec.cache import load_cache
from selfspec.errors import BuildError, CacheError, CliError
from selfspec.learning import top_k_of
from tests.building.test_counting_grams import assert_tables, expected_arrays

VOCABULARY = {"data": "vocabulary", "build": "lut", "batch": 7, "warmup_tokens": 0}
OWN = {"column": "prompt", "learn_from": "generations", "max_new_tokens": 6}


class TestTexts:
    def test_a_cache_of_both_kinds(self, tmp_path, build, lines, texts, tokenizer):
        build(tmp_path / "cache", data=str(lines), form="paragraph", licence="CC0")
        held = load_cache(tmp_path / "cache")
        counter = GramCounter(vocab_size=len(tokenizer))
        for text in texts:
            counter.add(tokenizer(text)["input_ids"])
        assert_tables(held.corpus, counter.tables().arrays())
        assert set(held.tables) == {"lut", "lut2"}
        tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts)
        about = held.about
        assert (about["documents"], about["tokens"], about["tokens_read"]) == (9, tokens, tokens)
        assert (about["name"], about["licence"], about["left_out"]) == ("tiny", "CC0", 0)
        assert about["recipe"]["data"] == lines.name
        assert str(tmp_path) not in json.dumps(about)

    def test_counting_needs_no_model(self, tmp_path, build, lines, model, monkeypatch):
        monkeypatch.setattr(type(model), "forward", None)
        contents = build(tmp_path / "cache", data=str(lines), form="paragraph", build="ngrams")
        assert contents.tables == {}
        assert "model" not in contents.about
        keys = {"data": str(lines), "form": "paragraph", "build": "ngrams", "min_count": 3}
        with pytest.raises(CacheError):
            build(tmp_path / "cache", **keys)
        build(tmp_path / "cache", overwrite=True, **keys)
        assert load_cache(tmp_path / "cache").about["recipe"]["min_count"] == 3

    def test_a_cache_of_the_vocabulary(self, tmp_path, build, tokenizer, model):
        """What the model says behind each token, as in an answer."""
        tables = build(tmp_path / "cache", **VOCABULARY).tables
        assert len(tables["lut2"]["ids"]) == 0, "no pair was read"
        size = len(tokenizer)
        assert tables["lut"]["tokens"].tolist() == list(range(size))
        hello = [{"role": "user", "content": "Hello"}]
        text = tokenizer.apply_chat_template(hello, tokenize=False, add_generation_prompt=True)
        prefix = tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in (0, 5, size - 1):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prefix, token]])).logits[0, -1]
            assert tables["lut"]["ids"][token].tolist() == logits.topk(8).indices.tolist()
        few = build(tmp_path / "few", **{**VOCABULARY, "warmup_tokens": 14})
        assert few.tables["lut"]["tokens"].tolist() == list(range(14))

    def test_the_luts_hold_what_the_model_says(self, model):
        """Each window alone, in order, gives the same."""
        documents = [np.arange(5, 12), None, np.array([20, 5, 6]), np.arange(30, 45)]
        memory, expected = (SelfSpec().memory(vocab_size(model)) for _ in range(2))
        recipe = Recipe.of(data="d", window=4, batch=2)
        assert sum(teach(memory, model, documents, recipe, prefix=[])) == 25
        for ids in (each for each in documents if each is not None):
            for start in range(0, len(ids), 4):
                window = ids[start : start + 4].tolist()
                with torch.inference_mode():
                    logits = model(torch.tensor([window])).logits[0]
                pairs = list(zip([-1, *window], window, strict=False))
                expected.observe_pairs(np.array(pairs), top_k_of(logits, memory.top_k))
        for source, key in (("lut", "tokens"), ("lut2", "pairs")):
            ours, theirs = memory.tables()[source], expected.tables()[source]
            assert np.array_equal(ours[key], theirs[key])
            assert np.array_equal(ours["ids"], theirs["ids"])
            assert np.allclose(ours["probabilities"], theirs["probabilities"], atol=2e-3)

    @pytest.mark.parametrize(
        ("data", "keys"),
        [
            ("", {}),
            ("", {"build": "lut"}),
            ("", {"learn_from": "generations"}),
            ('{"ids": [1, 99999]}', {"column": "ids", "build": "ngrams"}),  # the tokenizer lacks it
        ],
    )
    def test_data_with_nothing_for_this_model(self, tmp_path, build, loads_datasets, data, keys):
        path = tmp_path / ("data.jsonl" if data else "empty.txt")
        path.write_text(data)
        with pytest.raises(BuildError, match="--data"):
            build(tmp_path / "cache", data=str(path), **keys)
        assert list(tmp_path.iterdir()) == [path]


class TestOwnAnswers:
    """Stock's texts, on disk as they come, none twice, none mixed up."""

    @pytest.fixture
    def stopped(self, build, tmp_path, prompts, monkeypatch):
        """Starts a build that is stopped after some answers; returns the file of answers."""

        def stop(after: int):
            real = module.results

            def stopping(*args, **more):
                for number, outcome in enumerate(real(*args, **more)):
                    if number == after:
                        break
                    yield outcome
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(module, "results", stopping)
                with pytest.raises(KeyboardInterrupt):
                    build(tmp_path / "cache", data=str(prompts), **OWN)
            assert not (tmp_path / "cache.safetensors").exists()
            return tmp_path / "cache.answers" / "answers.jsonl"

        return stop

    def test_answers_are_stocks_and_none_is_lost(self, tmp_path, build, prompts, model, tokenizer):
        contents = build(tmp_path / "cache", data=str(prompts), **OWN, min_count=1)
        about = contents.about
        assert (about["prompts"], about["answers"], about["left_out"]) == (5, 4, 1)
        assert about["model"]
        assert contents.calibration
        assert len(contents.tables["lut"]["tokens"])
        documents = []
        for number in range(4):
            chat = [{"role": "user", "content": f"say {number}"}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            mask = torch.ones_like(ids)
            stock = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
            documents.append(stock[0, ids.shape[1] - 4 :].tolist())
        assert_tables(contents.corpus, expected_arrays(documents, 4, [1] * 4))
        assert not (tmp_path / "cache.answers").exists()

    @pytest.mark.parametrize(("after", "torn"), [(0, 0), (3, 5), (4, 0)])
    def test_a_stopped_build_goes_on(self, tmp_path, build, prompts, stopped, after, torn):
        whole = build(tmp_path / "whole", data=str(prompts), **OWN)
        path = stopped(after)
        if after:
            data = path.read_bytes()
            assert data.count(b"\n") == after
            path.write_bytes(data[: len(data) - torn])
        contents = build(tmp_path / "cache", data=str(prompts), **OWN)
        assert_tables(contents.corpus, whole.corpus.arrays())
        assert {**contents.about} == {**whole.about}
        assert len(contents.tables["lut"]["tokens"])
        assert contents.calibration

    @pytest.mark.parametrize(
        "keys", [{"temperature": 0.7}, {"max_documents": 2}, {"chat_template": False}]
    )
    def test_answers_are_never_mixed_with_those_of_other_settings(
        self, tmp_path, build, prompts, stopped, keys
    ):
        path = stopped(3)
        before = path.read_bytes()
        with pytest.raises(BuildError, match="holds the answers of another build"):
            build(tmp_path / "cache", data=str(prompts), **{**OWN, **keys})
        assert path.read_bytes() == before
        build(tmp_path / "cache", data=str(prompts), **OWN, min_count=1)  # Changes no answer.

    def test_answers_that_were_only_begun_teach_nothing(self, tmp_path, build, prompts, stopped):
        whole = build(tmp_path / "whole", data=str(prompts), **OWN)
        path = stopped(0)
        build(tmp_path / "other", data=str(prompts), **OWN, chat_template=False)
        shutil.copy(tmp_path / "other.safetensors", path.with_name("memory.safetensors"))
        found = build(tmp_path / "cache", data=str(prompts), **OWN).tables
        assert np.array_equal(found["lut"]["tokens"], whole.tables["lut"]["tokens"])

    def test_more_prompts_are_no_other_prompts_but_not_for_two_at_once(
        self, tmp_path, build, prompts, stopped
    ):
        path = stopped(3)
        rows = prompts.read_text().splitlines()
        prompts.write_text("\n".join([*rows, rows[0]]) + "\n")
        files = module.BatchFiles(path.with_name("prompts.jsonl"), path)
        with files.locked(), pytest.raises(CliError, match="two runs at once"):
            build(tmp_path / "cache", data=str(prompts), **OWN)
        assert build(tmp_path / "cache", data=str(prompts), **OWN).about["answers"] == 5

    def test_a_prompt_that_comes_twice_has_two_answers(
        self, tmp_path, build, prompts, monkeypatch, loads_datasets
    ):
        kept = []
        monkeypatch.setattr(module.shutil, "rmtree", kept.append)
        prompts.write_text('{"prompt": "say a"}\n' * 2)
        build(tmp_path / "cache", data=str(prompts), **OWN, temperature=2.0)
        lines = (kept[0] / "answers.jsonl").read_text().splitlines()
        one, other = (json.loads(line)["ids"] for line in lines)
        assert one != other

    def test_prompts_that_the_model_can_not_answer(self, tmp_path, build, prompts):
        with pytest.raises(BuildError, match="--data"):
            build(tmp_path / "cache", data=str(prompts), **OWN, max_prompt_tokens=1)
        keys = {**OWN, "max_new_tokens": 512}
        with pytest.raises(BuildError, match="--max-new-tokens"):
            build(tmp_path / "cache", data=str(prompts), **keys)
