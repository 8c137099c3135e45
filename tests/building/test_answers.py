"""The model's own answers: stock's text, on disk as they come, none twice, none mixed up."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from selfspec.building import answers as module
from selfspec.building.answers import OwnAnswers, opened_folder, usable
from selfspec.building.recipe import Recipe
from selfspec.errors import BuildError
from tests.building.test_counting_grams import assert_tables, expected_arrays

OWN = {"column": "prompt", "learn_from": "generations", "max_new_tokens": 6}


@pytest.fixture
def counted(monkeypatch):
    """How many prompts the model was asked to answer."""
    asked = []
    real = module.generate_many

    def counting(model, tokenizer, prompts, **more):
        asked.append(len(prompts))
        return real(model, tokenizer, prompts, **more)

    monkeypatch.setattr(module, "generate_many", counting)
    return asked


@pytest.fixture
def stopped(build, tmp_path, prompts, counted, monkeypatch):
    """Starts a build that is stopped after some answers."""

    def stop(after: int, error: type[BaseException] = KeyboardInterrupt, **keys):
        real = module.generate_many

        def stopping(*args, **more):
            for number, answer in enumerate(real(*args, **more)):
                if number == after:
                    raise error
                yield answer
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(module, "generate_many", stopping)
            with pytest.raises(error):
                build(tmp_path / "cache", data=str(prompts), **OWN, **keys)
        assert not (tmp_path / "cache").exists()
        return tmp_path / "cache.answers" / "answers.jsonl"

    return stop


def test_answers_are_stocks_and_none_is_lost(tmp_path, build, prompts, model, tokenizer):
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("after", [0, 1, 3, 4])
def test_a_stopped_build_goes_on(tmp_path, build, prompts, stopped, counted, after, error):
    whole = build(tmp_path / "whole", data=str(prompts), **OWN)
    path = stopped(after, error)
    assert len(path.read_text().splitlines()) == 1 + after
    contents = build(tmp_path / "cache", data=str(prompts), **OWN)
    assert counted[-1] == 4 - after
    assert_tables(contents.corpus, whole.corpus.arrays())
    assert {**contents.about} == {**whole.about}
    assert len(contents.tables["lut"]["tokens"])
    assert contents.calibration


def test_a_torn_line_is_written_anew(tmp_path, build, prompts, stopped, counted):
    whole = build(tmp_path / "whole", data=str(prompts), **OWN)
    path = stopped(3)
    path.write_bytes(path.read_bytes()[:-5])
    contents = build(tmp_path / "cache", data=str(prompts), **OWN)
    assert counted[-1] == 2
    assert_tables(contents.corpus, whole.corpus.arrays())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"temperature": 0.7}, "--temperature was 0.0, is 0.7"),
        ({"max_new_tokens": 5}, "--max-new-tokens was 6, is 5"),
        ({"max_documents": 2}, "--data had another prompt 2"),
        ({"chat_template": False}, "--data had another prompt 0"),
    ],
)
def test_answers_are_never_mixed_with_those_of_other_settings(
    tmp_path, build, prompts, stopped, counted, keys, said
):
    path = stopped(3)
    before = path.read_bytes()
    with pytest.raises(BuildError, match=said) as caught:
        build(tmp_path / "cache", data=str(prompts), **{**OWN, **keys})
    assert "delete that folder to begin anew" in str(caught.value)
    assert path.read_bytes() == before
    assert len(counted) == 1
    build(tmp_path / "cache", data=str(prompts), **OWN, min_count=1)  # Changes no answer.


def test_other_prompts_are_refused_and_more_prompts_are_not(tmp_path, build, prompts, stopped):
    stopped(3)
    rows = prompts.read_text().splitlines()
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([rows[1], rows[0], *rows[2:]]) + "\n")
    with pytest.raises(BuildError, match="--data had another prompt"):
        build(tmp_path / "cache", data=str(other), **OWN)
    other.write_text("\n".join([*rows, rows[0]]) + "\n")
    assert build(tmp_path / "cache", data=str(other), **OWN).about["answers"] == 5


def test_what_was_learned_is_not_kept_without_its_answers(build, tmp_path, prompts, stopped):
    stopped(3).unlink()
    with pytest.raises(BuildError, match="what was learned, without the answers"):
        build(tmp_path / "cache", data=str(prompts), **OWN)


@pytest.mark.parametrize("content", ["[]\n", "{}\n", '{"settings": 3}\n', "\x00\n"])
def test_a_file_of_something_else(tmp_path, content):
    (tmp_path / "answers.jsonl").write_text(content)
    with pytest.raises(BuildError, match="a file that can't be read"):
        OwnAnswers(tmp_path, {}, [])


def test_a_prompt_that_comes_twice_has_two_answers(tmp_path, model, tokenizer):
    """Also where the build was stopped between them."""
    from selfspec import SelfSpec

    prompt = np.array([5, 6, 7])
    recipe = Recipe.of(data="d", temperature=2.0, max_new_tokens=8, learn_from="generations")
    for prompts in ([prompt], [prompt, prompt]):
        own = OwnAnswers(tmp_path, {}, prompts)
        spec = SelfSpec(remember=own.memory, tokenizer=tokenizer)
        own.complete(model, tokenizer, spec, recipe, lambda *_: None)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()[1:]
    one, other = (json.loads(line)["ids"] for line in lines)
    assert one != other


def test_answers_to_count_stand_behind_the_end_of_their_prompts(tmp_path):
    line = {"prompt": 0, "checksum": module._checksum(np.arange(9)), "ids": [20, 21]}
    (tmp_path / "answers.jsonl").write_text(f'{{"settings": {{}}}}\n{json.dumps(line)}\n')
    own = OwnAnswers(tmp_path, {}, [np.arange(9)])
    assert [each.tolist() for each in own.documents(3)] == [[6, 7, 8, 20, 21]]


def test_long_prompts_are_left_out(model):
    recipe = Recipe.of(data="d", max_prompt_tokens=3, max_new_tokens=6)
    found = usable(iter([np.arange(3), None, np.arange(4)]), recipe, model)
    assert [None if each is None else len(each) for each in found] == [3, None, None]
    with pytest.raises(BuildError, match=r"--max-new-tokens must leave room .* 512 .*\(got 512\)"):
        usable(iter([]), Recipe.of(data="d", max_new_tokens=512), model)


HOLD = """
import sys
from pathlib import Path
from selfspec.building.answers import opened_folder
with opened_folder(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_who_is_there(tmp_path):
    output = tmp_path / "cache"
    command = [sys.executable, "-c", HOLD, str(output)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == "in\n"
        said = f"is being built by process {holder.pid} on "
        with pytest.raises(BuildError, match=said), opened_folder(output):
            pass
        holder.stdin.close()
        assert holder.wait() == 0
    with opened_folder(output):
        pass
