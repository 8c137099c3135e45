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


def test_with_and_without_a_terminal(monkeypatch, capsys):
    def work():
        with working("Loading [bold]") as update:
            update("Timing")
        with working("Reading", only_spinner=True):
            pass

    work()
    assert capsys.readouterr().err == "Loading [bold] ...\n"
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True)
    monkeypatch.setattr(messages, "Console", lambda stderr: console)
    work()
    assert "Timing ..." in stream.getvalue()
    assert "Reading ..." in stream.getvalue()


@pytest.mark.parametrize("command", ["check", "chat", "generate"])
def test_words_are_on_the_screen_before_torch_is_imported(command, chat_folder):
    code = _NO_TORCH.format(args=[command, chat_folder])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, input="x"
    )
    assert result.stderr.startswith("Loading ")


@pytest.mark.parametrize("verbose", [False, True])
def test_the_log_is_shown_in_plain_lines_and_a_warning_once(capsys, verbose):
    logger = logging.getLogger("selfspec")
    show_log(not verbose)
    show_log(verbose)
    logger.info("packed %d layers", 30)
    logger.warning("drafting is off")
    logger.warning("drafting is off")
    lines = ["packed 30 layers"] * verbose + ["warning: drafting is off"]
    assert capsys.readouterr().err.splitlines() == lines
