"""The command as a whole: help, version, options, mistakes, what it says, and how it ends."""

import io
import logging
import subprocess
import sys

import pytest
from rich.console import Console

import selfspec
from selfspec import SpecConfig
from selfspec.cli import generate as generate_module
from selfspec.cli import messages
from selfspec.cli.messages import show_log, working
from selfspec.cli.options import Knobs

COMMANDS = ("demo", "check", "chat", "generate", "batch", "serve", "cache", "cache build")
# Runs a command where torch can't be imported, so that only what comes before it is on the screen.
NO_TORCH = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "datasets"]))
from selfspec.cli import main
sys.argv[1:] = {args}
main()
"""


def python(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, input="x")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_on_one_screen(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) <= 40


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["cache", "build", "--help"], "Usage:"),
        (["--version"], f"selfspec {selfspec.__version__}\n"),
        (["generate", "m", "nowhere"], "error: FILE"),
        (["chat", "{model}"], "Loading "),
    ],
)
def test_what_needs_no_torch_comes_before_it(args, said, chat_folder):
    done = python("-c", NO_TORCH.format(args=[arg.format(model=chat_folder) for arg in args]))
    assert (done.stdout + done.stderr).lstrip().startswith(said)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["check", "{model}", "--wat"], "--wat"),
        (["generate", "{model}", "--max-nodes", "0"], "max_nodes"),
        (["generate", "{model}", "--sources", "lutt"], "'lut'?"),
        (["generate", "{model}", "--seed", "1.5"], "--seed: it must be a whole number (got '1.5')"),
        (["generate", "{model}", "--max-nodes", "8.5"], "--max-nodes: it must be"),
        (["batch", "{model}", "a", "b", "--max-rows", "2.0"], "--max-rows"),
        (["generate", "{model}", "--temperature", "-1"], "--temperature"),
        (["generate", "{model}", "--temperature", "inf"], 'Invalid value "inf" for --temperature'),
        (["generate", "{model}", "--max-memry", "1GB"], "--max-memory?"),
        (["generate", "{model}", "--draft-model", "./no"], "--draft-model"),
        (["generate"], "MODEL"),
        (["batch", "{model}", "in.jsonl"], "OUTPUT"),
        (["demo", "--dtype", "int8"], "--dtype"),
        (["generate", "{model}", "--budget", "fitted"], "--budget"),
        (["demoo"], '"demo"?'),
        (["demo", "this"], "unknown argument 'this'; see --help"),
        (["check", "./nowhere"], "MODEL"),
        (["check", "{model}", "--device", "gpu"], "device must be"),
        (["cache", "build", "{model}", "o", "--data", "no.jsonl"], "(got 'no.jsonl')"),
        (["serve", __file__], "MODEL"),
        (["cache", "build", "/", "out", "--data", __file__], "MODEL"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(fails, plain_folder, args, said):
    assert said in fails(*(arg.format(model=plain_folder) for arg in args))


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyError("a bug"), None), (OSError(5, "I/O"), None), (KeyboardInterrupt, 130)],
)
def test_what_nobody_foresaw_keeps_its_traceback(run, plain_folder, monkeypatch, error, status):
    def broken(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(generate_module, "load_writer", broken)
    if status is None:
        with pytest.raises(type(error)):
            run("generate", plain_folder, stdin="text")
    else:
        assert run("generate", plain_folder, stdin="text").exit_code == status


def test_knobs_have_the_defaults_of_the_config():
    assert Knobs().config() == SpecConfig()


def test_a_terminal_shows_what_it_is_doing(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(messages, "Console", lambda stderr: console)
    with working("Loading [bold]", only_spinner=True) as update:
        update("Timing [bold]")
    assert "Timing [bold] ..." in console.file.getvalue()


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


def test_the_package_itself_runs_as_a_command():
    assert python("-m", "selfspec", "-V").stdout == f"selfspec {selfspec.__version__}\n"


def test_a_warning_says_whose_it_is_where_no_logging_is_set_up():
    warn = "logging.getLogger('selfspec').warning('%s is so', 1)"
    set_up = "logging.basicConfig(); " + warn
    said = [python("-c", f"import logging, selfspec; {each}").stderr for each in (warn, set_up)]
    assert said == ["selfspec: 1 is so\n", "WARNING:selfspec:1 is so\n"]
