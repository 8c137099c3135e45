"""`selfspec check`: figures, a picture, a verdict, and lines to copy."""

from __future__ import annotations

import json

import pytest
from selfspec.cli.check.check_measuring import Answered, Compared, Measured
from selfspec.cli.check.check_report import bars, python_lines, verdict

from selfspec.cli.check import check_command as check_module
from selfspec.cli.shared.options import RunOptions
from selfspec.cost import CostCurve
from selfspec.machine import memory
from selfspec.stats import GenerationStats
from tests.fakes import new_model
from tests.tiny import make_tokenizer

CURVE = CostCurve({1: 0.02, 4: 0.022, 64: 0.05})


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture
def prompts(tmp_path):
    lines = ({"turns": ["the lazy dog", "and then"]}, {"prompt": "def read("})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_measures_both_precisions_and_says_what_to_use(run, chat_folder, prompts, tmp_path):
    out = tmp_path / "check.json"
    result = run("check", chat_folder, "--prompts", prompts, "--seconds", "1", "--output", out)
    assert result.exit_code == 0, result.stderr
    said = result.stdout
    for words in ("bfloat16, plain", "float32, selfspec", "prompt 1", "prompt 2", "Cost of a"):
        assert words in said
    assert f'from_pretrained("{chat_folder}", dtype="' in said
    assert "faster with selfspec, in " in said or "No gain here (" in said
    found = json.loads(out.read_text())
    assert [each["dtype"] for each in found["precisions"]] == ["bfloat16", "float32"]
    for each in found["precisions"]:
        assert each["widths"][:2] == [1, 2]
        assert len(each["prompts"]) == 2
        assert 0 <= each["entropy"] < 9  # bits; the vocabulary has fewer than 512 tokens
    kept = json.loads((tmp_path / "caches" / "selfspec" / "measured.json").read_text())
    assert len(kept["entries"]) == 2  # Later calls start from these.


def test_its_own_prompts_and_one_precision(run, chat_folder):
    result = run("check", chat_folder, "--seconds", "1", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    assert "edit, with prediction=" in result.stdout
    assert "summary" not in result.stdout  # It leaves no room in the 512 positions of this model.
    assert "bfloat16" not in result.stdout


def test_a_model_without_trees_has_no_picture(run, prompts, tmp_path):
    folder = tmp_path / "recurrent"
    new_model("mamba", vocab_size=512).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    result = run("check", folder, "--prompts", prompts, "--seconds", "1", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    assert "No gain here (" in result.stdout
    assert "because the model is not drafted for: " in result.stdout
    assert "Cost of a step" not in result.stdout


def test_what_does_not_fit_is_left_out_or_refused(run, fails, chat_folder, prompts, monkeypatch):
    number, _ = check_module._num_parameters_and_free_memory(RunOptions(model=chat_folder))
    free = {"bytes": 0.0}
    monkeypatch.setattr(memory, "free_memory", lambda _device: free["bytes"])
    assert "MODEL must fit into memory" in fails("check", chat_folder)
    free["bytes"] = 3.5 * number
    said = run("check", chat_folder, "--prompts", prompts, "--seconds", "1").stdout
    assert "float32 is left out: it takes " in said
    assert "float32, plain" not in said


def test_what_is_wrong_is_one_line(fails, chat_folder, tmp_path):
    assert "--prompts must be readable" in fails("check", chat_folder, "--prompts", tmp_path)
    assert "unknown dtype 'int8'" in fails("check", chat_folder, "--dtype", "int8")


def measured(speed_up: float, tokens_per_step: float = 1.5, **more) -> Measured:
    plain, drafted = (Answered(9, [1] * 11, 0.0, seconds) for seconds in (speed_up, 1.0))
    stats = GenerationStats(num_new_tokens=round(100 * tokens_per_step), num_steps=100)
    values = {"dtype": "float32", "about": {}, "curve": CURVE, "threads": {2: 0.02}, **more}
    return Measured(**values, prompts=[Compared("a", plain, drafted, 0.0, 1.0)], stats=stats)


def test_a_gain_is_told_with_the_lines_that_bring_it():
    found = [measured(1.8), measured(1.2, dtype="bfloat16", threads={1: 0.01, 2: 0.02})]
    assert verdict(found[:1]).startswith("1.80x faster with selfspec, in float32 (single prompts: ")
    assert python_lines("me/model", found[1:]) == [
        "torch.set_num_threads(1); "
        'model = AutoModelForCausalLM.from_pretrained("me/model", dtype="bfloat16")',
        "selfspec.attach(model, selfspec.SelfSpec())",
    ]
    assert "drafts gain nothing here" in python_lines("m", [measured(1.0)])[-1]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (measured(0.98, 1.02), "these answers are hard to guess: a step brought 1.02 tokens"),
        (measured(1.0, curve=CostCurve({1: 0.01, 4: 0.03})), "one of four tokens takes 3.0 plain"),
        (measured(1.0), "drafts cost about as much as they save"),
    ],
)
def test_no_gain_has_a_reason(found, why):
    said = verdict([found])
    assert said.startswith("No gain here (")
    assert why in said


def test_answers_of_different_lengths_are_compared_by_their_tokens():
    plain, drafted = Answered(9, [1] * 11, 1.0, 10.0), Answered(9, [1] * 6, 1.0, 2.0)
    assert Compared("a", plain, drafted, 0.0, 1.0).speed_up == pytest.approx(11 / 5)


def test_bars_are_to_scale():
    assert bars(CURVE)[::2] == ["   1   1.00 " + "█" * 20, "  64   2.50 " + "█" * 50]
