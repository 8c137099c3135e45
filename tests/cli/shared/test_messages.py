"""Words while a command works, and the library's log."""

import io
import logging
import subprocess
import sys

import pytest
from rich.console import Console

from selfspec.cli.shared import messages
from selfspec.cli.shared.messages import show_log, working

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
        messages, "Console", lambda stderr: Console(file=stream, force_terminal=True)
    )
    return stream


def test_without_a_terminal_there_is_one_plain_line(capsys):
    with working("Loading [bold]") as update:
        update("Loading more")
    with working("Reading", only_spinner=True):
        pass
    assert capsys.readouterr().err == "Loading [bold] ...\n"


def test_a_terminal_gets_a_spinner(terminal):
    with working("Loading") as update:
        update("Timing")
    with working("Reading", only_spinner=True):
        pass
    assert "Timing ..." in terminal.getvalue()
    assert "Reading ..." in terminal.getvalue()


@pytest.mark.parametrize(
    "args", [["demo"], ["generate", "MODEL", __file__], ["check", "MODEL"], ["chat", "MODEL"]]
)
def test_words_are_on_the_screen_before_torch_is_imported(args, chat_folder):
    args = [chat_folder if arg == "MODEL" else arg for arg in args]
    command = [sys.executable, "-c", _NO_TORCH.format(args=args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stderr.startswith(("Loading ", "Looking at the model "))
    assert "import of torch halted" in result.stderr or "transformers" in result.stderr


@pytest.mark.parametrize(
    ("verbose", "lines"),
    [
        (False, ["warning: drafting is off"]),
        (True, ["packed 30 layers", "warning: drafting is off"]),
    ],
)
def test_the_log_is_shown_in_plain_lines(capsys, verbose, lines):
    logger = logging.getLogger("selfspec")
    show_log(not verbose)
    show_log(verbose)
    logger.info("packed %d layers", 30)
    logger.warning("drafting is off")
    assert capsys.readouterr().err.splitlines() == lines
