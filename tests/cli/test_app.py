"""The command as a whole: help, version, and how it ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import selfspec
from selfspec.cli.app import app
from selfspec.cli.generate import generate_command as generate_module

COMMANDS = ("demo", "check", "chat", "generate", "batch", "serve", "tune")
CACHE_COMMANDS = ("build", "inspect", "merge")
_HELP = """
import sys
from selfspec.cli import main
sys.argv[1:] = {args}
try:
    main()
except SystemExit as end:
    heavy = {{"torch", "transformers", "datasets"}} & set(sys.modules)
    sys.exit(end.code or ", ".join(heavy) or None)
"""


def python(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=120, **kwargs
    )


@pytest.mark.parametrize(("words", "names"), [((), COMMANDS), (("cache",), CACHE_COMMANDS)])
def test_alone_it_prints_its_help(run, words, names):
    result = run(*words)
    assert result.exit_code == 0
    assert all(name in result.stdout for name in names)
    assert result.stderr == ""


def test_version(run):
    assert run("--version").stdout == f"selfspec {selfspec.__version__}\n"


@pytest.mark.parametrize("words", [*zip(COMMANDS), *(("cache", each) for each in CACHE_COMMANDS)])
def test_help_of_every_command(run, words):
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert "--verbose" in result.stdout
    assert "…─╮" not in result.stdout  # A heading that is cut off
    titles = re.findall("^╭─(.*)─╮$", result.stdout, re.MULTILINE)
    assert all(title.startswith(" ") and title.rstrip("─").endswith(" ") for title in titles)


def test_help_shows_every_word():
    """Between square brackets, rich would take a word for a colour, and show nothing of it."""
    for name, command in get_command(app).commands.items():
        for each in [*command.params, *_params_below(command)]:
            words = re.findall(r"\[\w+\]", getattr(each, "help", None) or "")
            assert not words, f"{name} {each.name}: write {words} without brackets"


def _params_below(command) -> list:
    return [each for below in getattr(command, "commands", {}).values() for each in below.params]


@pytest.mark.parametrize("args", [["--help"], ["cache", "build", "--help"]])
def test_help_needs_no_torch(args):
    done = python("-c", _HELP.format(args=args))
    assert done.returncode == 0, done.stderr


def test_runs_as_a_module_and_is_quick_to_complain(plain_folder):
    result = python("-m", "selfspec.cli", "generate", "nowhere.txt", "--model", plain_folder)
    assert result.returncode == 2
    assert result.stderr == (
        "error: FILE must be readable (got 'nowhere.txt': No such file or directory); a text "
        "itself goes through a pipe\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo", "--wat"], "--wat"),
        (["demo", "--max-nodes", "many"], "--max-nodes"),
        (["demo", "--max-nodes", "0"], "max_nodes must be >= 1 (got 0)"),
        (["demo", "--rounds", "0"], "--rounds"),
        (["generate", "--sources", "lutt"], "did you mean 'lut'?"),
        (["generate", "--learning", "no"], "unknown learning scope 'no'"),
        (["generate", "--temperature", "-1"], "--temperature"),
        (["chat", "--max-new-tokens", "0"], "--max-new-tokens"),
    ],
)
def test_wrong_options(fails, plain_folder, args, said):
    assert said in fails(*args, "--model", plain_folder)


def test_wrong_command(fails):
    assert "unknown command 'demoo'; did you mean 'demo'?" in fails("demoo")
    assert "unknown command 'bild'; did you mean 'build'?" in fails("cache", "bild")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nowhere", "--model must be a folder that exists"),
        (str(Path(__file__).parent), "--model must be a folder with a config.json"),
    ],
)
def test_wrong_models(fails, model, said):
    assert said in fails("generate", "--model", model, stdin="text")
    for command in ("check", "serve"):
        assert said.replace("--model", "error: MODEL") in fails(command, model)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--dtype", "int8", "unknown dtype 'int8'"),
        ("--device", "toaster", "--device must be one that torch can use here (got 'toaster'"),
        ("--max-new-tokens", "513", "must fit into the model's 512 positions"),
    ],
)
def test_wrong_values_for_a_model(fails, plain_folder, option, value, said):
    line = fails("generate", "--model", plain_folder, option, value, stdin="text")
    assert said in line


def test_what_nobody_foresaw_keeps_its_traceback(run, plain_folder, monkeypatch):
    def broken(*_args, **_kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(generate_module, "_write", broken)
    with pytest.raises(KeyError, match="a bug"):
        run("generate", "--model", plain_folder, stdin="text")


def test_ctrl_c_ends_it_quietly(run, plain_folder, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "_write", interrupted)
    result = run("generate", "--model", plain_folder, stdin="text")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr == f"Loading {plain_folder} ...\n"
