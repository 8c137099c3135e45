"""The same documents in the same order every time, and their token ids."""

import json

import pytest

from selfspec import building
from selfspec.building import find_files, read_ids
from selfspec.errors import BuildError

ASK = {"role": "user", "content": "say a"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.fixture
def read(tokenizer):
    """What documents come out as, as text again."""

    def texts(data):
        return [tokenizer.decode(ids) for ids in read_ids(str(data), tokenizer)]

    return texts


def fill(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def lines(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_folder_is_read_in_the_order_of_names_without_what_is_hidden(tmp_path):
    fill(tmp_path, "b[1]/c.txt", "a.txt", "b[1]/a.md", ".git/x", "b[1]/.hidden", "v1.2.notes")
    names = ("a.txt", "b[1]/a.md", "b[1]/c.txt", "v1.2.notes")
    assert find_files(str(tmp_path)) == [tmp_path / name for name in names]
    assert find_files(str(tmp_path / "**/*.md")) == [tmp_path / "b[1]/a.md"]
    assert find_files(str(tmp_path / "b[1]")) == [tmp_path / "b[1]" / n for n in ("a.md", "c.txt")]
    assert find_files(str(tmp_path / "b[1]" / "c.txt")) == [tmp_path / "b[1]" / "c.txt"]
    (tmp_path / "empty").mkdir()
    for data in ("nowhere", "empty", "*.py"):
        with pytest.raises(BuildError, match="--data must be a file"):
            find_files(str(tmp_path / data))
    with pytest.raises(BuildError, match="--data must be a file"):
        find_files("")  # It is not the current folder.


def test_text_files(tmp_path, read, monkeypatch):
    """Pictures give nothing, what is no UTF-8 is replaced, and a long file is several texts."""
    (tmp_path / "a.png").write_bytes(b"PNG\0\0\1")
    (tmp_path / "b.txt").touch()
    (tmp_path / "c.txt").write_bytes(b"caf\xe9 noir")
    assert read(tmp_path) == ["caf\ufffd noir"]
    (tmp_path / "c.txt").write_text("one\ntwo\nthree é")
    monkeypatch.setattr(building, "_PIECE", 5)
    assert read(tmp_path) == ["one\ntwo\n", "three é"]


def test_lines_of_json(tmp_path, read, tokenizer):
    """As `selfspec batch` writes them, and conversations; a template may refuse one."""
    answer = {"line": 3, "text": "not this", "ids": tokenizer("x y")["input_ids"], "stats": {}}
    rows = ({"text": "ab\n"}, {"text": ""}, answer, {"messages": [ASK, ANSWER]})
    said = "<|user|>say a<|assistant|>a<|eos|>"
    assert read(lines(tmp_path / "a.jsonl", *rows)) == ["ab\n", "x y", said]


def test_a_conversation_that_the_template_refuses(tmp_path, read, tokenizer, monkeypatch):
    template = "{% if messages|length > 1 %}{{ raise_exception('too many') }}{% endif %}ok"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    path = lines(tmp_path / "a.jsonl", {"messages": [ASK, ANSWER]}, {"messages": [ASK]})
    assert read(path) == ["ok"]
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert read(path) == []  # Without a template nothing takes them.


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"text": \n', "line 2: JSON: Invalid JSON: EOF"),
        ('{"ids": ["x"]}', r"line 2: ids\.0: Input should be a valid integer.*, got 'x'\)$"),
        ('{"txt": "x"}', "line 2: it must have ids, a text, or messages"),
    ],
)
def test_a_line_that_is_wrong(tmp_path, read, row, said):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{row}')
    with pytest.raises(BuildError, match=said):
        read(tmp_path / "a.jsonl")
