"""One process at a time, and a journal that refuses another build's work."""

import json
import subprocess
import sys

import pytest

from selfspec.building.work_folder import open_work_folder
from selfspec.errors import BuildError

WHAT = {"min_count": 2, "files": ["a"]}

HOLD = """
import sys
from pathlib import Path
from selfspec.building.work_folder import open_work_folder
with open_work_folder(Path(sys.argv[1]), {}, restart=False):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def output(tmp_path):
    return tmp_path / "cache"


def opened(output, identity=WHAT, *, restart=False):
    return open_work_folder(output, identity, restart=restart)


def test_what_was_noted_is_there_again(output):
    with opened(output) as work:
        assert work.folder == output.with_name("cache.building")
        work.note("counting", {"documents": 3})
        work.note("reading", {"tokens": 4})
        journal = json.loads((work.folder / "journal.json").read_text())
    assert journal["identity"] == WHAT
    with opened(output) as work:
        assert work.progress == {"counting": {"documents": 3}, "reading": {"tokens": 4}}


def test_another_build_is_refused_and_restart_begins_anew(output):
    with opened(output) as work:
        work.note("counting", {"documents": 3})
        (work.part("runs") / "x").write_text("")
    message = r"holds another build \(min_count was 2, is 3\).*--restart"
    with pytest.raises(BuildError, match=message), opened(output, {**WHAT, "min_count": 3}):
        pass
    with opened(output, {**WHAT, "min_count": 3}, restart=True) as work:
        assert work.progress == {}
        assert not (work.folder / "runs").exists()


@pytest.mark.parametrize("journal", ["", "{}", "[]", '{"identity": 3, "progress": {}}', "\x00"])
def test_a_journal_that_is_none(output, journal):
    with opened(output) as work:
        (work.folder / "journal.json").write_text(journal)
    with pytest.raises(BuildError, match="--restart"), opened(output):
        pass


def test_a_second_process_is_told_who_is_there(output):
    command = [sys.executable, "-c", HOLD, str(output)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "in\n"
        said = f"is being built by process {holder.pid} on "
        with pytest.raises(BuildError, match=said), opened(output):
            pass
        holder.stdin.close()
        assert holder.wait() == 0
    with opened(output, {}):
        pass


def test_a_place_that_cant_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    said = "output must be in a folder that can be written"
    with pytest.raises(BuildError, match=said), opened(tmp_path / "file" / "cache"):
        pass
