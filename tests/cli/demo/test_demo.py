"""`selfspec demo`: what it shows, what it times, and what it says where texts differ."""

import json
import re
import shutil
from collections import Counter
from io import StringIO

import pytest
import torch
from rich.console import Console

from selfspec import DraftTree, SpecConfig, StepRecord
from selfspec.cli.demo import timing as timing
from selfspec.cli.demo.differences import Difference, differences, explain
from selfspec.cli.demo.showing import Demo
from selfspec.cli.demo.snippets import SNIPPETS, Snippet
from selfspec.cli.demo.tables import Row, summarise
from selfspec.cli.demo.timing import Run, Timed, measure
from selfspec.cli.shared.live_text import OWN
from selfspec.cli.shared.options import Sampling
from selfspec.cli.shared.paint import harmless
from selfspec.records import Evidence

FEW = ("--max-new-tokens", "16")
TWO = ("--prompt", "the quick brown", "--prompt", "def read(")


@pytest.fixture
def demo(run, plain_folder):
    return lambda *args: run("demo", "--model", plain_folder, *FEW, *args)


def test_texts_are_stocks_and_the_table_says_how_they_came(demo, stock_text, plain_folder):
    """Without a terminal it is plain text in 80 columns."""
    result = demo(*TWO, "--tree")
    assert result.exit_code == 0
    assert "The step with the longest accepted path" in result.stdout
    assert "└── " in result.stdout
    assert "\x1b" not in result.stdout
    tables = result.stdout[result.stdout.index("snippet") :]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in tables
    for prompt in TWO[1::2]:
        assert prompt + harmless(stock_text(prompt, 16)) in result.stdout
    assert "Same text: 2 of 2 are stock generate()'s, token for token." in result.stdout
    times, origins = re.findall(r"^ *all +(.*?) *$", result.stdout, re.MULTILINE)
    assert re.fullmatch(
        r"32( +\d+\.\d\d){2} s +\d+\.\d\d s +\d+\.\d\dx +\d+\.\d\d to \d+\.\d\d", times
    )
    assert 98 <= sum(int(share) for share in re.findall(r"(\d+)%", origins)) <= 102
    doing = ["Loading", "Warming up", "Timing"]
    assert [
        line.split(" ...")[0].removesuffix(f" {plain_folder}")
        for line in result.stderr.splitlines()
    ] == doing


def test_its_own_snippets_are_the_default_and_it_ends_with_the_command_for_another_model(run, demo):
    assert "'selfspec check' measures several" in demo(*TWO, "--rounds", "1").stdout
    said = " ".join(run("demo", *FEW, "--rounds", "1").stdout.split())
    assert all(snippet.name in said for snippet in SNIPPETS)
    assert f"Same text: {len(SNIPPETS)} of {len(SNIPPETS)}" in said
    assert "sampling at temperature 0.5, seed 1" in said
    assert said.endswith("measure yours in a minute with 'selfspec check your/model'.")


def test_a_deep_tree_is_not_cut_off_in_a_pipe(writer):
    console = Console(file=StringIO(), width=40)
    show = Demo(writer, SpecConfig(), [Snippet("one", "the")], console=console)
    tree = DraftTree.of_root(7)
    for node in range(20):
        tree.add(node, 8, 0.5, (Evidence("lut"),))
    record = StepRecord(row=0, tree=tree, path=list(range(21)), committed_ids=[8] * 20)
    show._draw_tree([Timed(drafted=[Run([8] * 20, 1.0, records=[record])])])
    assert console.file.getvalue().count("0.50 lut") == 20


def test_no_tree_where_nothing_is_drafted(demo):
    result = demo(*TWO, "--tree", "--sources", "")
    assert result.exit_code == 0
    assert "No tree to draw: nothing was drafted." in result.stdout


def test_the_models_own_generation_config_is_the_default(run, plain_folder, tmp_path):
    folder = tmp_path / "sampling"
    shutil.copytree(plain_folder, folder)
    config = {"do_sample": True, "temperature": 0.5, "eos_token_id": 1, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    out = run("demo", "--model", folder, *FEW, *TWO, "--seed", "1").stdout
    assert "sampling at temperature 0.5, seed 1" in out
    assert "Same text: 2 of 2" in out
    out = run("demo", "--model", folder, *FEW, *TWO, "--temperature", "0").stdout
    assert ", greedy" in out.replace("\n", " ")


def wrong_fourth_token(monkeypatch):
    """Every drafted text differs from stock's."""

    def other(writer, ids, spec):
        run = own_run(writer, ids, spec)
        if spec is not None:
            run.new_ids[3] = (run.new_ids[3] + 1) % 300
        return run

    own_run = timing._run
    monkeypatch.setattr(timing, "_run", other)


def test_another_text_is_told_and_fails(demo, monkeypatch):
    wrong_fourth_token(monkeypatch)
    result = demo(*TWO)
    assert result.exit_code == 1
    assert "NOT the same text: the quick brown: token 4 differs: stock" in result.stdout
    said = result.stdout.replace("\n", " ")
    assert "not a near-tie in float32" in said
    assert "Same text" not in result.stdout


def test_in_half_precision_another_text_is_told_and_allowed(demo, monkeypatch):
    wrong_fourth_token(monkeypatch)
    result = demo(*TWO, "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert "of 2 are stock generate()'s" in result.stdout
    assert "texts may part at near-ties" in result.stdout.replace("\n", " ")
    assert "  the quick brown: token 4 differs: stock" in result.stdout
    assert "NOT the same" not in result.stdout


def test_a_text_that_only_the_screen_saw_wrong_is_found_too():
    right = Run([1, 2, 3], 1.0)
    timed = [Timed([right], [right])]
    assert differences(timed, [[1, 2, 3]]) == []
    assert differences(timed, [[1, 2]]) == [Difference(0, 2, [1, 2, 3], [1, 2])]


def test_a_near_tie_is_called_one(writer):
    writer.model.to(torch.bfloat16)
    prompt = writer.encode("the")
    with torch.no_grad():
        logits = writer.model(torch.tensor([prompt])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    head = writer.model.get_output_embeddings().weight.data
    head[second] = head[first]
    line, is_allowed = explain(writer, prompt, Difference(0, 0, [first], [second]))
    assert is_allowed
    assert line.startswith("token 1 differs: stock ")
    assert line.endswith(", a near-tie in bfloat16")
    lowest = int(logits.argmin())
    line, is_allowed = explain(writer, prompt, Difference(0, 0, [first], [lowest]))
    assert line.endswith(", not a near-tie in bfloat16")
    assert is_allowed
    writer.model.to(torch.float32)
    assert explain(writer, prompt, Difference(0, 0, [first], [second]))[1]
    assert not explain(writer, prompt, Difference(0, 0, [first], [lowest]))[1]
    line, is_allowed = explain(writer, prompt, Difference(0, 1, [7, 8], [7]))
    assert not is_allowed, "the end of a text has no logit"
    assert line.startswith("token 2 differs: stock ")
    assert line.endswith("selfspec the end")
    writer.sampling = Sampling(temperature=1.0, seed=0)
    line, is_allowed = explain(writer, prompt, Difference(0, 0, [7], [8]))
    assert "logits" not in line
    assert not is_allowed


def coloured(writer, **settings):
    console = Console(file=StringIO(), force_terminal=True, width=80, **settings)
    show = Demo(writer, SpecConfig(), [Snippet("one", "the quick")], console=console)
    assert show.run(with_tree=True)
    return console.file.getvalue()


def test_a_terminal_gets_colours_and_a_legend(writer):
    assert "drafted by" not in coloured(writer, no_color=True)
    out = coloured(writer, color_system="standard")
    assert "drafted by \x1b[36mlut\x1b[0m  \x1b[96mlut2\x1b[0m  \x1b[32mcontext\x1b[0m" in out
    assert "plain: the model's own" in out


def test_rounds_start_cold_and_take_turns(writer, monkeypatch):
    calls = []

    def noted(_writer, ids, spec):
        calls.append((ids[0], spec))
        return Run([1], 1.0)

    monkeypatch.setattr(timing, "_run", noted)
    measure(writer, [[5], [6]], SpecConfig(), rounds=2)
    drafts = [spec is not None for _, spec in calls]
    assert [prompt for prompt, _ in calls] == [5, 5, 6, 6] * 2
    assert drafts == [False, True, True, False, True, False, False, True]
    specs = [spec for _, spec in calls if spec is not None]
    assert specs[0] is specs[1]
    assert specs[2] is specs[3]
    assert specs[0] is not specs[2]


def rounds_of(stock, drafted) -> Timed:
    return Timed([Run([1], s) for s in stock], [Run([1], s) for s in drafted])


def test_a_row_has_the_median_speed_up_and_how_far_the_rounds_differ():
    one, other, total = summarise(
        ["one", "other"],
        [rounds_of([2, 2, 36], [1, 1, 2]), rounds_of([4, 4, 4], [4, 2, 2])],
    )
    assert (one.speed_ups, one.spread) == ([2, 2, 18], "2.00 to 18.00")
    assert (other.speed_ups, other.spread) == ([1, 2, 2], "1.00 to 2.00")
    assert (total.name, total.speed_ups) == ("all", [6 / 5, 6 / 3, 40 / 4])
    assert total.is_unsteady
    assert not Row("", [rounds_of([2, 2.1], [1, 1])]).is_unsteady
    assert Row("", [rounds_of([2], [1])]).spread == "-"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([1.0, 9.0, 1.0], "The rounds differ widely (1.00 to 9.00)"),
        ([1.0, 1.1, 1.0], None),
        ([1.0], "One round can't show how much the times vary"),
    ],
)
def test_unsteady_times_are_not_told_as_a_fact(writer, seconds, said):
    console = Console(file=StringIO(), width=200)
    show = Demo(writer, SpecConfig(), [Snippet("one", "the")], len(seconds), console)
    show._report([rounds_of(seconds, [1.0] * len(seconds))])
    text = console.file.getvalue()
    assert said in text if said else "differ widely" not in text


def test_origins_add_up_to_all_tokens(writer):
    ids = writer.encode("the quick brown fox")
    (timed,) = measure(writer, [ids], SpecConfig(), rounds=1)
    counts = timed.drafted[0].count_origins()
    assert counts.total() == 24
    assert Run([1, 2, 3], 1.0).count_origins() == Counter({OWN: 3})


@pytest.mark.parametrize(("num_branches", "named"), [(0, []), (2, ["grams"])])
def test_origins_are_those_that_there_can_be(writer, num_branches, named):
    config = SpecConfig(sources=("lut", "context", "corpus"), num_branches=num_branches)
    assert writer.origins(config) == ["lut", "context", *named]
