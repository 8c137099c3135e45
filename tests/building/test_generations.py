"""The model's own answers: stock's text, on disk as they come, none twice."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console

from selfspec import SelfSpec
from selfspec.building.generations import Generations, read_answers
from selfspec.building.limits import vocab_size
from selfspec.building.progress import Bars
from selfspec.building.recipe import Recipe
from selfspec.building.work_folder import open_work_folder
from selfspec.errors import BuildError
from tests.building.test_warmup import assert_same

PROMPTS = [[5, 6, 7], None, [8], [9] * 30, [10, 11, 12, 13, 14, 15], [16, 17], [5, 6, 8]]
USABLE = [0, 2, 4, 5, 6]


def recipe(**keys):
    few = {"batch": 2, "max_prompt_tokens": 8, "max_new_tokens": 6}
    return Recipe.of(**{"name": "n", "data": "d", "learn_from": "generations", **few, **keys})


def generate(folder, model, tokenizer, *, batches=None, kill=None, **keys):
    """Generates on in `folder`; stopped after so many batches. `kill` breaks the stage off."""
    spec = SelfSpec(strict=True, budget="fixed", max_nodes=16)  # as a build: it hangs on no clock
    with open_work_folder(folder / "c", {}, restart=False) as work:
        stage = Generations(work, recipe(**keys), model, tokenizer, spec)
        answer, left = stage._answer, [batches]

        def counted(prompts):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] = left[0] and left[0] - 1
            return answer(prompts)

        stage._answer = counted
        if kill:
            kill(stage)
        prompts = [each and np.array(each, np.uint32) for each in PROMPTS[stage.documents :]]
        if not stage.finished:
            with Bars(Console(quiet=True)) as bars:
                stage.run(iter(prompts), bars.stage("generating", None))
        lines = (work.folder / "generations.jsonl").read_text().splitlines()
        memory = spec.memory(vocab_size(model))
        return [json.loads(line) for line in lines], memory.tables(), memory.calibration.rows()


def test_answers_are_stocks(tmp_path, model, tokenizer):
    answers, tables, rates = generate(tmp_path, model, tokenizer)
    assert [each["document"] for each in answers] == USABLE
    for each in answers:
        prompt = PROMPTS[each["document"]]
        ids = torch.tensor([prompt])
        stock = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
        assert each["ids"] == stock[0, len(prompt) :].tolist()
        assert each["prompt_end"] == prompt[-4:]
        assert each["text"] == tokenizer.decode(each["ids"], skip_special_tokens=True)
    assert len(tables["lut"]["tokens"])
    assert rates


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("batches", [0, 1, 2])
def test_an_interrupted_run_ends_the_same(tmp_path, model, tokenizer, batches, temperature):
    keys = {"temperature": temperature, "seed": 3}
    whole = generate(tmp_path / "whole", model, tokenizer, **keys)
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        generate(folder, model, tokenizer, batches=batches, **keys)
    for _ in range(2):  # once to the end, once when all is there
        answers, tables, rates = generate(folder, model, tokenizer, **keys)
        assert answers == whole[0]
        assert_same(tables, whole[1])
        assert rates == whole[2]


def kill_in(name):
    """Breaks the second batch off right before the stage's method `name`."""

    def break_off(stage):
        owner = stage._learned if hasattr(stage._learned, name) else stage
        method, calls = getattr(owner, name), []

        def broken(*arguments):
            calls.append(1)
            if len(calls) == 2:
                raise SystemExit
            method(*arguments)

        setattr(owner, name, broken)

    return break_off


@pytest.mark.parametrize("name", ["save", "_append", "keep_only"])
def test_a_kill_at_any_step_loses_no_answer_and_doubles_none(tmp_path, model, tokenizer, name):
    whole = generate(tmp_path / "whole", model, tokenizer)
    with pytest.raises(SystemExit):
        generate(tmp_path, model, tokenizer, kill=kill_in(name))
    answers, tables, rates = generate(tmp_path, model, tokenizer)
    assert answers == whole[0]
    assert_same(tables, whole[1])
    assert rates == whole[2]


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_file_is_cut_back_to_whole_batches(tmp_path, model, tokenizer, cut):
    whole = generate(tmp_path / "whole", model, tokenizer)
    with pytest.raises(SystemExit):
        generate(tmp_path, model, tokenizer, kill=kill_in("keep_only"))
    path = tmp_path / "c.building" / "generations.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert generate(tmp_path, model, tokenizer)[0] == whole[0]


def test_seeds_differ_and_the_global_stream_stays(tmp_path, model, tokenizer):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    texts = [
        generate(tmp_path / str(seed), model, tokenizer, temperature=2.0, seed=seed)[0]
        for seed in (0, 100)
    ]
    assert texts[0] != texts[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_an_answer_ends_at_the_end_of_text(tmp_path, model, tokenizer):
    first = generate(tmp_path / "a", model, tokenizer)[0][0]["ids"]
    model.generation_config.eos_token_id = [first[2], 1]
    try:
        answers = generate(tmp_path / "b", model, tokenizer)[0]
    finally:
        model.generation_config.eos_token_id = 1
    assert answers[0]["ids"] == first[: first.index(first[2]) + 1]


def test_answers_to_count_stand_behind_the_end_of_their_prompts(tmp_path, model, tokenizer):
    answers = generate(tmp_path, model, tokenizer)[0]
    documents = [each.tolist() for each in read_answers(tmp_path / "c.building", 1)]
    assert documents == [[*each["prompt_end"], *each["ids"]] for each in answers[1:]]


def test_answers_that_leave_no_room_for_a_prompt(tmp_path, model, tokenizer):
    with pytest.raises(BuildError, match=r"max_new_tokens must leave room .* 512 .*\(got 512\)"):
        generate(tmp_path, model, tokenizer, max_new_tokens=512)
