"""One tree on the screen."""

from io import StringIO

import pytest
from rich.console import Console

from selfspec import DraftTree, StepRecord
from selfspec.cli.demo.tree_view import best_step, draw, readable
from selfspec.records import Evidence
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
LUT, CONTEXT = (Evidence("lut"),), (Evidence("context"), Evidence("lut"))


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


def record(num_accepted=2, with_own=True):
    """a -> (b -> (c, \\n), space); a-b-c is right, and the model goes on with !"""
    a, b, c, newline, space, own = ids_of("abc\n !")
    tree = DraftTree.of_root(a)
    b_node = tree.add(0, b, 0.5, LUT)
    c_node = tree.add(b_node, c, 0.25, CONTEXT)
    tree.add(b_node, newline, 0.125, LUT)
    tree.add(0, space, 0.1, LUT)
    path = [0, b_node, c_node][: num_accepted + 1]
    committed = [tree.tokens[node] for node in path[1:]] + [own] * with_own
    return StepRecord(row=0, tree=tree, path=path, committed_ids=committed)


def drawn(step):
    console = Console(file=StringIO(), width=60)
    console.print(draw(step, TOKENIZER))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_tree_with_its_accepted_path():
    assert drawn(record()) == [
        "'a'",
        "├── ✓ 'b'  0.50 lut",
        "│   ├── ✓ 'c'  0.25 context+lut",
        "│   │   └── => '!'  the model's own next",
        "│   └──   '\\n'  0.12 lut",
        "└──   ' '  0.10 lut",
    ]


def test_nothing_accepted_hangs_the_models_own_under_the_root():
    assert drawn(record(num_accepted=0))[-1] == "└── => '!'  the model's own next"


def test_the_best_step_has_the_longest_accepted_path():
    steps = [record(1), record(2), record(0)]
    assert best_step(steps) is steps[1]


@pytest.mark.parametrize(("text", "seen"), [(" ", "' '"), ("\n", "'\\n'"), ("x", "'x'")])
def test_whitespace_is_readable(text, seen):
    assert readable(TOKENIZER, ids_of(text)[0]) == seen


def test_half_a_character_is_shown_by_its_name():
    assert readable(TOKENIZER, ids_of("é")[0]) == "<Ã>"
