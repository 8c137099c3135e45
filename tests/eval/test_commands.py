"""Each command of eval once, end to end on tiny models, and the figures that its last line has."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from eval import bench_batch, bench_streamed, budgets, first_call, predict
from eval.benches.stdlib import Edit
from eval.kv_memory import compare, watched
from eval.methods.method import Method
from eval.methods.one_call import Job as Call
from eval.methods.one_call import Result as Called
from eval.methods.registry import METHODS
from eval.methods.streamed_job import LOOKUP, SMALL, Job, Result
from eval.methods.streamed_job import METHODS as STREAMED
from eval.report.statistics import STAGES
from tests.fakes import new_model, prompt
from tests.streamed import least_memory, saved_model
from tests.tiny import make_tokenizer

SHORT = ["--threads", "1", "--max-new-tokens", "8", "--limit"]
needs_server = pytest.mark.skipif(
    not all(map(find_spec, ("fastapi", "uvicorn", "openai"))),
    reason="the server needs the extra: pip install 'selfspec[serve,test]'",
)
needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two units need two cores to be pinned to",
)


def test_bench_step(told, asked, measuring):
    methods = ["--methods", "stock", "prompt-lookup", "forward-only", "selfspec", "stock-static"]
    status, lines, _ = told("bench_step", *asked, *SHORT, "3", *methods, "--knob", "top_k=4")
    result = json.loads(lines[-1])
    assert status == 0
    ours, stock = (result["methods"][name]["overall"] for name in ("selfspec", "stock"))
    assert result["num_done"] == ours["num_same"] == 3
    assert result["settings"]["knobs"] == {"top_k": 4}
    assert set(ours["stage_ms"]) == set(STAGES)
    assert list(result["methods"]["stock"]) == ["multi-turn", "qa", "overall"]
    assert ours["drafting_speed_up"]["total"] > 0
    assert stock["speed_up"] is None
    assert result["left_out"]["stock-static"].startswith("transformers does not compile")
    assert result["bound"]["64"]["speed_up"] >= 1
    assert sum(" tokens: stock " in line for line in lines) == 3


class Broken(Method):
    """Fails on every prompt but the warm-up's."""

    num_asked = 0

    def answer(self, model, ids, **asked):
        self.num_asked += 1
        if self.num_asked > 1:
            raise RuntimeError("no more")
        return super().answer(model, ids, **asked)


def test_a_failure_is_told_by_the_exit_status(told, asked, monkeypatch):
    monkeypatch.setitem(METHODS, "broken", lambda _: Broken("broken"))
    status, lines, _ = told("bench_step", *asked, *SHORT, "1", "--methods", "stock", "broken")
    assert status == 1
    assert any("broken FAILED (RuntimeError: no more)" in line for line in lines)
    figures = json.loads(lines[-1])["methods"]["broken"]["overall"]
    assert (figures["num_failed"], figures["speed_up"]) == (1, None)


def test_bench_batch(figures, asked):
    asked += [*SHORT, "4", "--every", "1", "--rows", "2", "--budget", "fixed", "--max-nodes", "4"]
    found = figures("bench_batch", *asked)["figures"]
    assert list(found) == list(bench_batch.DEFAULTS)
    assert {each["num_same"] for each in found.values()} == {4}
    assert found["shortest"]["nodes_per_step"] > found["rows alone"]["nodes_per_step"] == 1
    assert all(each["half_s"] <= each["all_s"] for each in found.values())


@pytest.mark.slow
@needs_server
def test_bench_server(figures, asked):
    asked += [*SHORT, "4", "--every", "1", "--methods", "selfspec", "--leaving", "0.5"]
    (found,) = figures("bench_server", *asked)["rounds"]
    assert (found["clients"], found["server"], found["num_same"]) == (1, "selfspec", None)
    assert found["num_left_behind"] == 0
    assert 0 < found["first_s"] <= found["answer_s"]


@needs_server
@pytest.mark.slow
def test_both_servers_give_the_same_answers(figures, asked):
    asked += [*SHORT, "4", "--every", "1", "--clients", "1", "2"]
    rounds = figures("bench_server", *asked, "--budget", "fixed", "--max-nodes", "4")["rounds"]
    order = [(each["clients"], each["server"]) for each in rounds]
    assert order == [(1, "transformers"), (1, "selfspec"), (2, "selfspec"), (2, "transformers")]
    assert all(each["num_same"] == 2 for each in rounds), rounds


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    make_tokenizer().save_pretrained(folder)
    saved_model(folder, vocab_size=len(AutoTokenizer.from_pretrained(folder)))
    return folder


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="samples memory as Linux tells it")


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("method", STREAMED)
def test_a_process_answers_within_a_budget(deep_folder, method):
    small = AutoModelForCausalLM.from_pretrained(deep_folder) if method == SMALL else None
    least = least_memory(deep_folder, max_length=32, draft_model=small)
    folder, knobs = str(deep_folder), {"budget": "fixed"}
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10]]
    job = Job(folder, "streamed", 10**9, 32, prompts, 12, "float32", 1, knobs, folder)
    budget = int(least.removesuffix("KB")) * 1000
    result = bench_streamed._answered(job._replace(method=method, max_memory=budget))
    whole = bench_streamed._answered(job)
    assert result.texts == whole.texts
    assert result.num_steps <= whole.num_steps == 22
    assert (result.num_nodes is None) == (method == LOOKUP)
    assert result.peak_bytes > 0 == whole.seconds_read
    if method != "accelerate":
        assert result.bytes_read > 6 * 4096 * result.num_forwards  # Each forward reads all layers.


@needs_linux
def test_bench_streamed(deep_folder, questions, told, monkeypatch):
    made = []

    def answered(each: Job) -> Result:
        made.append(each)
        seconds = 8.0 if each.method == "accelerate" else 2.0
        texts = [[1] * 9 for _ in each.prompts]
        num_nodes = 16 if each.method == "streamed" else None
        return Result(texts, seconds, 8, num_nodes, 10**9, 10, 2.0, 0.5, 7 * 10**6, 10**6)

    monkeypatch.setattr(bench_streamed, "_answered", answered)
    options = ["--model", str(deep_folder), "--questions", str(questions), "--limit", "1"]
    options += ["--max-memory", "50%", "3MB", "--rounds", "2", "--dtype", "float32"]
    methods = ["accelerate", "streamed"]
    _, lines, _ = told("bench_streamed", *options, "--methods", *methods)
    assert [each.method for each in made[:4]] == [*methods, *methods[::-1]]
    assert made[5].max_memory == 3 * 10**6 > made[4].max_memory
    assert "## Within 3MB: 3 MB" in lines
    row = "| streamed | 4.00 | 4.00–4.00 | 4.00x | 1.00 | 2.0 | 100 | 75% | 7 | 1 | 1 of 1 |"
    assert lines.count(row) == 2
    assert sum("| 1.00 | – | 100 |" in line for line in lines) == 2


@pytest.mark.slow
def test_a_first_call_runs_in_a_process_with_folders_of_its_own(chat_folder):
    job = Call(chat_folder, "selfspec", [5, 6, 7], 4, "float32", 1, {"max_nodes": 4})
    result = first_call._call(job)
    assert len(result.new_ids) == 4
    assert min(result.call_seconds, result.load_seconds, result.import_seconds) > 0
    assert result.disabled_reason is None
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).iterdir())


def test_first_call(chat_folder, figures, monkeypatch):
    """No process is started: seconds come from a list."""
    jobs, seconds = [], iter([9.0, 9.0, 3.0, 2.0, 4.0, 4.4, 3.2, 2.0])

    def call(job):
        jobs.append(job)
        return Called(next(seconds), 1.0, 0.5, [1, 2], None)

    monkeypatch.setattr(first_call, "_call", call)
    asked = ["--model", chat_folder, "--rounds", "3", "--knob", "top_k=4"]
    told = figures("first_call", *asked)
    assert [job.method for job in jobs] == ["stock", "selfspec", "selfspec", "stock"] * 2
    assert told["seconds"] == {"stock": [2.0, 4.0, 2.0], "selfspec": [3.0, 4.4, 3.2]}
    assert (told["ratio"], told["ratios"]) == (1.6, [1.5, 1.1, 1.6])
    assert jobs[0].knobs == {"top_k": 4}


COLUMN = 2 * 2 * 8 * 4  # One layer's keys and values, 2 heads of 8 float32 numbers.


def test_the_kv_is_counted_to_the_byte_and_ours_holds_no_more_than_a_tree_besides(chat_folder):
    model = new_model(num_hidden_layers=1)
    inputs = prompt(length=20)
    memory = watched(model, lambda: model.generate(**inputs, max_new_tokens=10, do_sample=False))
    assert memory == (29 * COLUMN, COLUMN, None)  # The last token's KV is never made.
    assert not model._forward_hooks
    for num_prompt, num_new, width in ((200, 40, 16), (17, 120, 16)):
        found = compare(model, num_prompt, num_new, max_nodes=width)
        assert found["stock"]["held"] == (num_prompt + num_new - 1) * COLUMN
        assert found["selfspec"]["held"] >= found["stock"]["held"]
        assert found["is_allowed"]


def test_kv_memory(figures, chat_folder):
    options = ["--prompt-tokens", "20", "30", "--new-tokens", "5", "--max-nodes", "4"]
    rows = figures("kv_memory", "--model", chat_folder, *options, "--dtype", "bfloat16")["rows"]
    assert [(row["num_prompt_tokens"], row["width"]) for row in rows] == [(20, 4), (30, 4)]
    assert all(row["is_allowed"] for row in rows)


def test_tokens_per_step(figures, asked, tmp_path):
    asked += [*SHORT, "3", "--temperature", "0.8", "--max-nodes"]
    result = figures("tokens_per_step", *asked, "1", "8", "--knob", "max_depth=9")
    plain, wide = (row["figures"]["overall"] for row in result["rows"])
    assert plain == [1.0, 1.0]  # Plain decoding.
    tokens, nodes = wide
    assert tokens >= 1
    assert 1 < nodes <= 8
    asked += ["8", "--temperature", "0", "--remember", str(tmp_path / "kept")]
    (cold,), (warm,) = (figures("tokens_per_step", *asked)["rows"] for _ in range(2))
    assert warm["figures"]["overall"][0] > cold["figures"]["overall"][0]


def test_tokens_per_step_of_all_setups_in_one_command(figures, asked, tmp_path):
    kept = str(tmp_path / "kept")
    asked += [*SHORT, "3", "--max-nodes", "8"]
    figures("tokens_per_step", *asked, "--remember", kept)
    asked += ["--temperature", "0", "0.8", "--without", "lut", "--cache", "cold", kept]
    result = figures("tokens_per_step", *asked)
    assert result["cache"] == ["cold", "kept"]
    found = {
        (row["cache"], row["without"], row["temperature"]): row["figures"]["overall"][0]
        for row in result["rows"]
    }
    assert len(found) == len(result["rows"]) == 8
    assert found["kept", None, 0] > found["cold", None, 0] > found["cold", "lut", 0]


@pytest.mark.parametrize("hide", [pytest.param(True, marks=pytest.mark.slow), False])
def test_predict(plain_folder, figures, monkeypatch, hide):
    before = "class Hare:\n" + "    def run(self):\n        return self.legs\n\n" * 4
    edit = Edit("insert", before, "Insert a docstring.", before + '    """Runs."""\n')
    monkeypatch.setattr(predict, "stdlib_edits", lambda number: [edit] * 3 * number)
    asked = ["--model", plain_folder, "--functions", "1", "--budget", "fixed", "--max-nodes", "8"]
    told = figures("predict", *asked, *["--hide"] * hide)["methods"]
    steps = {name: by_task["overall"]["tokens_per_step"] for name, by_task in told.items()}
    assert steps["stock"] == 1
    assert told["selfspec"]["overall"]["speed_up"]["num_questions"] == 3
    assert steps["with a prediction"] > 4
    assert steps["selfspec"] < 4 or not hide


@pytest.mark.parametrize("busy", [[], ["--busy", "--noise", "0.3"]], ids=["quiet", "busy"])
def test_budgets(told, busy):
    recorded = str(Path(__file__).parent / "runs" / "recorded")
    options = ["--answers", "2x8", "--repeats", "1", *busy]
    status, (*table, line), _ = told("budgets", recorded, *options)
    assert status == 0
    assert "1B, bfloat16, row by row" in "".join(table)
    assert set(json.loads(line)["answers"]["2 answers of 8 tokens"]) == set(budgets.CASES)


@needs_cores
def test_hetero_gives_the_models_own_logits(figures, chat_folder):
    options = ["--model", chat_folder, "--columns", "20", "--width", "4", "16", "--rounds", "1"]
    rows = figures("hetero", *options)["rows"]
    assert [row["width"] for row in rows] == [1, 4, 16]
    assert set(rows[1]["ms"]) == {"one unit", "by rows", "by columns"}
    assert max(row["difference"] for row in rows) < 1e-4


@needs_cores
def test_attention_by_its_boundary_and_in_all_ways(figures):
    options = ["--shape", "135m", "--columns", "20", "--width", "6", "--rounds", "1"]
    (row,) = figures("hetero", "--boundary", *options)["rows"]
    assert row["dynamic"] <= row["static"]
    for row in figures("hetero", "--attention", *options)["rows"]:
        assert row["difference"] < (1e-5 if row["dtype"] == "float32" else 0.03)


@pytest.mark.slow
def test_train_tiny_writes_a_loadable_folder(tmp_path, figures):
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.mkdir()
    for number in range(6):
        text = "".join(f"def f{number}_{i}(x):\n    return x + {i}\n\n\n" for i in range(20))
        (sources / f"m{number}.py").write_text(text, encoding="utf-8")
    options = f"--out {out} --sources {sources} --steps 3 --batch-tokens 64 --seq-len 32"
    found = figures("train_tiny", *options.split())
    assert (found["num_steps"], found["num_seen"]) == (3, 192)
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    model = LlamaForCausalLM.from_pretrained(out, local_files_only=True)
    assert model.dtype == torch.bfloat16
    inputs = tokenizer(["def f(x):\n", "é\tx"], padding=True, return_tensors="pt")
    assert tokenizer.decode(inputs.input_ids[1], skip_special_tokens=True) == "é\tx"
    assert model.generate(**inputs, max_new_tokens=2).shape[0] == 2
