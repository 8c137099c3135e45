from pathlib import Path

import numpy as np
import pytest

from eval.errors import EvalError
from eval.models.tiny_corpus import (
    EOS,
    MAX_VOCABULARY,
    PAD,
    all_windows,
    build_corpus,
    is_table,
    is_wanted,
    list_sources,
    pack,
    split_sources,
    stdlib_folder,
    train_tokenizer,
    windows,
)

TEXTS = ["def f(x):\n\treturn x  # é\n", "class A:\n    pass\n"]


def write_files(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n", encoding="utf-8")
    return folder


def relative_sources(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in list_sources(folder)]


def test_library_code_is_wanted_without_tests_packages_and_build_settings() -> None:
    wanted = ["doctest.py", "unittest/case.py", "configparser.py", "test.py"]
    others = ["test/a.py", "json/tests/a.py", "idlelib/idle_test/a.py", "site-packages/a.py"]
    others += ["_sysconfigdata__linux.py", "config-3.11-x86/a.py"]
    assert [name for name in (*wanted, *others) if is_wanted(Path(name))] == wanted


def test_a_codec_is_a_table_and_prose_in_quotes_is_not() -> None:
    assert is_table("decoding_table = (\n" + "    '\\x00'     #  0x00 -> NULL\n" * 9 + ")\n")
    assert is_table("entities = {\n" + "    'AElig':    0x00c6,\n" * 9 + "}\n")
    assert not is_table(
        "topics = {'if': 'The if statement\\n'\n" + "    'is used for it.\\n'\n" * 9
    )


@pytest.mark.slow
def test_the_standard_library_is_listed_without_tests_and_tables() -> None:
    names = relative_sources(stdlib_folder())
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    assert "encodings/cp1252.py" not in names
    assert not [name for name in names if "/test" in f"/{name.rpartition('/')[0]}/"]
    assert len(names) > 400


def test_the_order_of_sources_depends_on_names_alone(tmp_path: Path) -> None:
    names = ["b.py", "a/z.py", "a.py", "a/b/c.py"]
    one = write_files(tmp_path / "one", names)
    two = write_files(tmp_path / "two", names[::-1])
    (one / "__init__.py").write_text("\n", encoding="utf-8")  # Empty files are no sources.
    assert relative_sources(one) == relative_sources(two) == sorted(names)


def test_splits_are_disjoint_complete_and_follow_the_seed() -> None:
    paths = [Path(f"{number}.py") for number in range(200)]
    train, held_out = split_sources(paths, seed=1)
    assert len(held_out) == 4
    assert sorted([*train, *held_out]) == sorted(paths)
    assert split_sources(paths, seed=1) == (train, held_out)
    assert split_sources(paths, seed=2) != (train, held_out)
    with pytest.raises(EvalError, match=r"at least 2 \.py files with text \(got 1\)"):
        split_sources([Path("a.py")], seed=0)


def test_packed_texts_end_in_eos_and_decode_to_themselves() -> None:
    tokenizer = train_tokenizer(TEXTS)
    ids = pack(tokenizer, TEXTS)
    assert ids.dtype == np.uint16
    assert tokenizer.get_vocab_size() <= MAX_VOCABULARY
    assert (tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)) == (0, 1)
    assert ids[-1] == 0
    assert list(ids).count(0) == len(TEXTS)
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert text == "".join(text + EOS for text in TEXTS)


def test_a_tokenizer_that_a_killed_run_left_is_used_again(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "sources", ["a.py", "b.py"])
    path = tmp_path / "checkpoint" / "tokenizer.json"
    build_corpus(folder, path, seed=0)
    left = path.read_bytes()
    build_corpus(write_files(folder, ["c.py"]), path, seed=0)
    assert path.read_bytes() == left


def test_windows_are_slices_spread_evenly_and_numbered() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    rows = windows(ids, first=0, count=100, length=10)
    assert (rows == rows[:, :1] + np.arange(10)).all()
    assert np.diff(np.sort(rows[:, 0])).max() < 30
    assert (windows(ids, first=60, count=40, length=10) == rows[60:]).all()


def test_all_windows_leaves_out_the_rest() -> None:
    assert all_windows(np.arange(7), length=3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_too_short_a_split_is_refused() -> None:
    with pytest.raises(EvalError, match=r"window of 8 tokens \(got 7\)"):
        all_windows(np.arange(7), length=8)
    with pytest.raises(EvalError, match=r"window of 8 tokens \(got 7\)"):
        windows(np.arange(7), first=0, count=1, length=8)
