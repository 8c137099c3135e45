"""Words while a command works, and the library's log."""

import io
import logging
import subprocess
import sys

import pytest
from rich.console import Console

from selfspec.cli.shared import waiting as waiting_module
from selfspec.cli.shared.log import show_log
from selfspec.cli.shared.waiting import waiting, working

# Fails as soon as torch is imported, so that only what comes before it is on the screen.
_NO_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from selfspec.cli import main
sys.argv[1:] = {args}
main()
"""


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """What a terminal on stderr would get."""
    stream = io.StringIO()
    monkeypatch.setattr(
        waiting_module, "Console", lambda stderr: Console(file=stream, force_terminal=True)
    )
    return stream


def test_without_a_terminal_there_is_one_plain_line(capsys):
    with working("Loading [bold]") as update:
        update("Loading more")
    with waiting("Reading"):
        pass
    assert capsys.readouterr().err == "Loading [bold] ...\n"


def test_a_terminal_gets_a_spinner(terminal):
    with working("Loading") as update:
        update("Timing")
    with waiting("Reading"):
        pass
    assert "Timing ..." in terminal.getvalue()
    assert "Reading ..." in terminal.getvalue()


@pytest.mark.parametrize(
    "args", [["demo"], ["generate", __file__], ["check"], ["chat", "--model", "MODEL"]]
)
def test_words_are_on_the_screen_before_torch_is_imported(args, chat_folder):
    args = [chat_folder if arg == "MODEL" else arg for arg in args]
    command = [sys.executable, "-c", _NO_TORCH.format(args=args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stderr.startswith(("Loading ", "Looking at the model "))
    assert "import of torch halted" in result.stderr or "transformers" in result.stderr


@pytest.fixture
def logger():
    """The library's logger, left as it was found."""
    logger = logging.getLogger("selfspec")
    before = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:], logger.level = before


@pytest.mark.parametrize(
    ("verbose", "lines"),
    [
        (False, ["warning: drafting is off"]),
        (True, ["packed 30 layers", "warning: drafting is off"]),
    ],
)
def test_the_log_is_shown_in_plain_lines(logger, capsys, verbose, lines):
    show_log(not verbose)
    show_log(verbose)
    logger.info("packed %d layers", 30)
    logger.warning("drafting is off")
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("command", ["demo", "chat", "generate", "check"])
def test_every_command_can_be_verbose(run, command):
    assert "--verbose" in run(command, "--help").stdout


@pytest.mark.parametrize("command", ["build", "inspect", "merge", "verify"])
def test_every_cache_command_can_be_verbose(run, command):
    assert "--verbose" in run("cache", command, "--help").stdout
