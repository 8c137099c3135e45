"""Each command of eval once, end to end on tiny models, and the figures that its last line has."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval import bench_batch, bench_streamed, first_call, gpu, predict, replay
from eval.benches.stdlib import Edit
from eval.functions import counted
from eval.hetero_units import attention
from eval.hetero_units.model import widths_table
from eval.jobs.one_call import Result as Called
from eval.jobs.streamed import Job, Result
from eval.models import hybrid
from eval.report.statistics import STAGES
from tests.fakes import new_model
from tests.streamed import least_memory, saved_model
from tests.tiny import make_tokenizer

SHORT = ["--threads", "1", "--max-new-tokens", "8", "--limit"]
needs_server = pytest.mark.skipif(
    not all(map(find_spec, ("fastapi", "uvicorn", "openai"))),
    reason="the server needs the extra: pip install '.[serve,test]'",
)
needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two units need two cores to be pinned to",
)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="samples memory as Linux tells it")


def test_the_measuring_set(told, asked, measuring, tmp_path):
    methods = ["stock", "prompt-lookup", "forward-only", "selfspec", "stock-static"]
    asked += [*SHORT, "3", "--methods", *methods, "--knob", "top_k=4", "--device", "cpu"]
    status, lines, error = told("run", "--measuring-set", *asked, "--output", str(tmp_path / "out"))
    assert status == 0, error
    result = json.loads((tmp_path / "out" / "summary.json").read_text())
    ours = result["methods"]["selfspec"]["overall"]
    assert result["num_done"] == ours["num_same"] == 3
    assert result["settings"]["knobs"] == {"top_k": 4}
    assert set(ours["stage_ms"]) == set(STAGES)
    assert list(result["methods"]["stock"]) == ["multi-turn", "qa", "overall"]
    assert ours["drafting_speed_up"]["total"] > 0
    assert result["left_out"]["stock-static"].startswith("transformers does not compile")
    assert any(line.startswith("Bound, decoding alone, every draft right: ") for line in lines)


# These need another model, a file, heads, or a package.
def test_a_run_without_a_folder_is_shown(told, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    status, lines, _ = told("run", "--measuring-set", *asked, *SHORT, "2", "--methods", "stock")
    assert status == 0
    assert (json.loads(lines[-1])["summary"], set(tmp_path.iterdir())) == (None, before)


def test_bench_batch(figures, asked):
    asked += [*SHORT, "4", "--every", "1", "--rows", "2", "--budget", "fixed", "--max-nodes", "4"]
    found = figures("bench_batch", *asked)["figures"]
    assert list(found) == list(bench_batch.DEFAULTS)
    assert {each["num_same"] for each in found.values()} == {4}
    assert found["shortest"]["nodes_per_step"] > found["rows alone"]["nodes_per_step"] == 1
    assert all(each["half_s"] <= each["all_s"] for each in found.values())


@needs_server
@pytest.mark.slow
def test_bench_server(figures, asked):
    """Both servers give the same answers; of one whose clients leave nothing stays behind."""
    asked += [*SHORT, "4", "--every", "1", "--budget", "fixed", "--max-nodes", "4"]
    rounds = figures("bench_server", *asked, "--clients", "1", "2")["rounds"]
    order = [(each["clients"], each["server"]) for each in rounds]
    assert order == [(1, "transformers"), (1, "selfspec"), (2, "selfspec"), (2, "transformers")]
    assert all(each["num_same"] == 2 for each in rounds), rounds
    left = ["--methods", "selfspec", "--leaving", "0.5"]
    (found,) = figures("bench_server", *asked, *left)["rounds"]
    assert (found["num_same"], found["num_left_behind"]) == (None, 0)
    assert 0 < found["first_s"] <= found["answer_s"]


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    make_tokenizer().save_pretrained(folder)
    saved_model(folder, vocab_size=len(AutoTokenizer.from_pretrained(folder)))
    return folder


@needs_linux
@pytest.mark.slow
def test_bench_streamed_in_its_own_processes(deep_folder, figures, questions):
    options = ["--model", str(deep_folder), "--questions", str(questions), "--limit", "1"]
    least = least_memory(deep_folder, max_length=128)
    options += ["--max-memory", least, "--max-length", "128", "--rounds", "1"]
    options += ["--dtype", "float32", "--max-new-tokens", "8", "--budget", "fixed"]
    methods = figures("bench_streamed", *options)["figures"][least]["methods"]
    assert {each["same_texts"] for each in methods.values()} == {1}
    assert methods["streamed"]["bytes_per_step"] > 6 * 4096  # Each forward reads all layers.


@needs_linux
def test_bench_streamed(deep_folder, questions, told, monkeypatch):
    """No process is started."""
    made = []

    def answered(each: Job) -> Result:
        made.append(each)
        seconds = 8.0 if each.method == "accelerate" else 2.0
        num_nodes = 16 if each.method == "streamed" else None
        texts = [[1] * 9 for _ in each.prompts]
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


def test_first_call(chat_folder, figures, monkeypatch):
    """No process is started: seconds come from a list."""
    jobs, seconds = [], iter([9.0, 9.0, 3.0, 2.0, 4.0, 4.4, 3.2, 2.0])

    def call(job):
        jobs.append(job)
        return Called(next(seconds), 1.0, 0.5, [1, 2], None)

    monkeypatch.setattr(first_call, "_call", call)
    told = figures("first_call", "--model", chat_folder, "--rounds", "3", "--knob", "top_k=4")
    assert [job.method for job in jobs] == ["stock", "selfspec", "selfspec", "stock"] * 2
    assert told["seconds"] == {"stock": [2.0, 4.0, 2.0], "selfspec": [3.0, 4.4, 3.2]}
    assert (told["ratio"], told["ratios"]) == (1.6, [1.5, 1.1, 1.6])
    assert jobs[0].knobs == {"top_k": 4}


OPENVINO = """
class LLMPipeline:
    def __init__(self, folder, device, **options):
        assert options == {"INFERENCE_NUM_THREADS": 1}
    def generate(self, inputs, config):
        assert config.ignore_eos and not config.do_sample
        self.tokens = [list(range(config.max_new_tokens))]
        return self
class GenerationConfig: pass
def TokenizedInputs(*arrays): return arrays
"""


def test_openvino_takes_part(asked, told, tmp_path, monkeypatch):
    """What answers in the other process is a module that only counts."""
    (tmp_path / "openvino_genai.py").write_text(OPENVINO)
    (tmp_path / "openvino.py").write_text("Tensor, __version__ = list, '1'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = ["--output", str(tmp_path / "out"), "--openvino", sys.executable, str(tmp_path)]
    methods = ["--methods", "stock", "selfspec", "openvino"]
    status, _, error = told("run", "--measuring-set", *asked, *SHORT, "2", *methods, *out)
    assert status == 0, error
    overall = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]["openvino"]
    figures = overall["overall"]
    assert (figures["num_answers"], figures["num_new_tokens"]) == (2, 16)
    assert figures["speed_up"]["total"] > 0
    assert (figures["decode_speed_up"], figures["tokens_per_step"]) == (None, 1.0)


def test_gpu_without_a_card(asked, told, tmp_path, monkeypatch):
    """What needs a card says so; a second run measures only what the first had no time for."""
    rows = ("plain generate()", "selfspec, by graphs", "after 256 tokens", "selfspec, run eagerly")
    cells = [cell for cell in gpu.CELLS if cell.row in rows and cell.column in ("ms", "8")]
    monkeypatch.setattr(gpu, "CELLS", cells)
    asked += ["--dtype", "float32", "--max-new-tokens", "8", "--limit", "2"]
    asked += ["--device", "cpu", "--out", str(tmp_path / "card.jsonl")]
    found = []
    for minutes in ("0", "12", "12"):
        status, lines, _ = told("gpu", *asked, "--minutes", minutes)
        assert status == 0
        assert "| selfspec, by graphs | itself | no card |" in lines
        found.append(
            {tuple(each["cell"]): each["value"] for each in json.loads(lines[-1])["cells"]}
        )
    assert set(found[0].values()) == {"no card", "no time"}
    assert found[1] == found[2]
    ours = next(value for cell, value in found[1].items() if "selfspec, run eagerly" in cell)
    assert "(2 of 2 texts)" in ours
    lines = (tmp_path / "card.jsonl").read_text().splitlines()
    assert len(lines) == 5  # What was asked, stock's texts, and three cells.
    path = tmp_path / "card.jsonl"  # A run goes on after stock's cell with stock's texts.
    path.write_text("".join(f"{line}\n" for line in lines if "run eagerly" not in line))
    told("gpu", *asked)
    assert "(2 of 2 texts)" in path.read_text().splitlines()[-1]
    for other in (["--max-new-tokens", "9"], ["--dtype", "bfloat16"], ["--limit", "1"]):
        status, _, error = told("gpu", *asked, *other)
        assert status == 2
        assert f"with another {other[0][2:].replace('-', '_')}" in error


def test_tokens_per_step(figures, asked, tmp_path):
    asked += [*SHORT, "3", "--knob", "max_depth=9", "--max-nodes"]
    rows = figures("tokens_per_step", *asked, "1", "8", "--temperature", "0.8")["rows"]
    plain, wide = (row["figures"]["overall"] for row in rows)
    assert plain == [1.0, 1.0]  # Plain decoding.
    assert 1 < wide[1] <= 8
    kept = str(tmp_path / "kept")
    figures("tokens_per_step", *asked, "8", "--remember", kept)
    asked += ["8", "--temperature", "0", "0.8", "--without", "lut", "--cache", "cold", kept]
    told = figures("tokens_per_step", *asked)
    assert told["cache"] == ["cold", "kept"]
    found = {
        (row["cache"], row["without"], row["temperature"]): row["figures"]["overall"][0]
        for row in told["rows"]
    }
    assert len(found) == len(told["rows"]) == 8
    assert found["kept", None, 0] > found["cold", None, 0] != found["cold", "lut", 0]


@pytest.mark.parametrize("more", [[], ["--samples", "3", "--temperature", "0.7"], ["--edit"]])
def test_the_same_questions_again(figures, asked, more):
    asked += [*SHORT, "2", "--max-nodes", "8", "--rounds", "2", "--without", "answers", "--stock"]
    stock, _, first, second, *without = figures("tokens_per_step", *asked, *more)["rows"]
    assert (stock["method"], stock["figures"]) == ("stock", {})
    assert [row["without"] for row in (first, second, *without)] == [
        None,
        None,
        "answers",
        "answers",
    ]
    if not more:  # The other token of the eight is the prompt's.
        assert second["figures"]["overall"][0] == 7 > first["figures"]["overall"][0]


def test_predict(plain_folder, figures, monkeypatch):
    before = "class Hare:\n" + "    def run(self):\n        return self.legs\n\n" * 2
    edit = Edit("insert", before, "Insert a docstring.", before + '    """Runs."""\n')
    first = Edit("insert", "1\n", "Insert a number.", "1\n2\n")  # That doesn't count.
    monkeypatch.setattr(predict, "stdlib_edits", lambda number: [first] * 3 + [edit] * 3)
    asked = ["--model", plain_folder, "--functions", "1", "--budget", "fixed", "--max-nodes", "8"]
    told = figures("predict", *asked, "--hide")["methods"]
    steps = {name: by_task["overall"]["tokens_per_step"] for name, by_task in told.items()}
    assert told["selfspec"]["overall"]["speed_up"]["num_questions"] == 3
    assert steps["stock"] == 1 <= steps["selfspec"] < 4 < steps["with a prediction"]


@pytest.mark.parametrize("busy", [[], ["--busy", "--noise", "0.3"]], ids=["quiet", "busy"])
def test_replay_on_clocks(told, busy):
    recorded = str(Path(__file__).parent / "runs" / "recorded")
    options = ["--answers", "2x8", "--repeats", "1", *busy]
    status, (*table, line), _ = told("replay", recorded, "--clock", *options)
    assert status == 0
    assert "1B, bfloat16, row by row" in "".join(table)
    assert set(json.loads(line)["answers"]["2 answers of 8 tokens"]) == set(replay.CASES)


@needs_cores
def test_hetero(figures, chat_folder):
    options = ["--columns", "20", "--width", "16", "--rounds", "1"]
    rows = figures("hetero", "--model", chat_folder, *options)["rows"]
    assert [row["width"] for row in rows] == [1, 16]
    assert set(rows[1]["ms"]) == {"one unit", "by rows", "by columns"}
    assert max(row["difference"] for row in rows) < 1e-4  # The model's own logits.


@needs_cores
def test_hetero_shows_every_width_and_tells_wrong_logits(told, chat_folder, monkeypatch):
    """Ghidorah's table I has no width of 24. A part that is left out is far from rounding."""
    row = {"columns": 20, "difference": 1e-6}
    times = {"one unit": 4.0, "by rows": 3.0, "by columns": 2.0}
    rows = [{**row, "width": 1, "ms": {"one unit": 2.0}}, {**row, "width": 24, "ms": times}]
    assert "| 24 | – | 4 | 3 | 2 | – | – | – | 1e-06 |" in widths_table(rows).markdown()
    monkeypatch.setattr(attention, "_joined", lambda text, _tree: text[0])
    options = ["--columns", "20", "--width", "4", "--rounds", "1"]
    assert told("hetero", "--model", chat_folder, *options)[0] == 1


@pytest.fixture
def small_hybrid(monkeypatch):
    """Lets a random model of one of the shapes be tiny."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    shape = {"model_type": "lfm2", "layer_types": "cca", **sizes, **heads}
    monkeypatch.setitem(hybrid.SHAPES, "lfm2-700m", shape)


@pytest.mark.usefixtures("small_hybrid")
def test_predict_with_a_random_model(figures):
    """Right predictions save steps."""
    asked = ["--random", "lfm2-700m", "--layers", "3", "--tokens", "24", "--texts", "1"]
    methods = figures("predict", *asked, "--shares", "0", "100", "--budget", "fixed")["methods"]
    steps = {name: by_task["overall"]["tokens_per_step"] for name, by_task in methods.items()}
    assert steps["stock"] == 1 <= steps["0 % right"] < steps["100 % right"]
    assert methods["100 % right"]["overall"]["nodes_per_step"] > 2


@pytest.mark.usefixtures("small_hybrid")
def test_nodes(figures):
    asked = ["--random", "lfm2-700m", "--vocabulary", "90", "--nodes", "4", "--rounds", "1"]
    models = figures("nodes", *asked, "--after", "32", "70")["models"]
    assert list(models) == ["lfm2-700m, after 32 tokens", "lfm2-700m, after 64 tokens"]
    for figure in models.values():
        assert figure["ms"].keys() == figure["costs"].keys() == {"1", "4"}
        assert figure["costs"]["1"] == 1


def test_functions_are_counted_to_the_first_token_and_in_a_step():
    first, step, steps = counted(new_model(), 32)
    assert 100 < first["functions"] < 250
    assert 100 < step["functions"] <= steps["functions"] < 300
    assert max(row["deep"] for row in (first, step, steps)) < 20
