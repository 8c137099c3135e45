"""The command as a whole: help, version, and how it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

import selfspec
from selfspec.cli import generate as generate_module

COMMANDS = ("demo", "check", "chat", "generate", "batch", "serve")
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
def test_help_of_every_command_is_on_one_screen(run, words):
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert "--verbose" in result.stdout
    most = {("demo",): 40, ("check",): 40, ("cache", "build"): 80}
    assert len(result.stdout.splitlines()) <= most.get(words, 60)
    for hidden in ("--width-decay", "--depth-decay", "--threshold", "--update-interval", "fitted"):
        assert hidden not in result.stdout


@pytest.mark.parametrize("args", [["--help"], ["cache", "build", "--help"]])
def test_help_needs_no_torch(args):
    done = python("-c", _HELP.format(args=args))
    assert done.returncode == 0, done.stderr


def test_runs_as_a_module_and_is_quick_to_complain(plain_folder):
    result = python("-m", "selfspec.cli", "generate", plain_folder, "nowhere.txt")
    assert result.returncode == 2
    assert result.stderr == (
        "error: FILE must be readable (got 'nowhere.txt': No such file or directory); --prompt "
        "takes the text itself\n"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo", "--wat"], "--wat"),
        (["generate", "{model}", "--max-nodes", "many"], "--max-nodes"),
        (["generate", "{model}", "--max-nodes", "0"], "max_nodes must be >= 1 (got 0)"),
        (["demo", "--seconds", "0"], "--seconds"),
        (["generate", "{model}", "--sources", "lutt"], "did you mean 'lut'?"),
        (["generate", "{model}", "--learning", "no"], "unknown learning scope 'no'"),
        (["generate", "{model}", "--temperature", "-1"], "--temperature"),
        (["generate", "{model}", "--max-memry", "1GB"], "Did you mean --max-memory?"),
        (["generate", "{model}", "--max-memory", "lots"], "--max-memory must be a number of"),
        (["generate", "{model}", "--budget", "fitted"], "--budget fitted needs --cache"),
        (["chat", "{model}", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate"], "MODEL must be given: a folder or a Hub id, such as "),
        (["batch", "{model}", "in.jsonl"], "OUTPUT must be given (got nothing); see 'selfspec ba"),
        (["demoo"], 'Unknown command "demoo". Did you mean "demo"?'),
        (["cache", "bild"], 'Unknown command "bild". Did you mean "build"?'),
    ],
)
def test_mistakes_are_one_line(fails, plain_folder, args, said):
    assert said in fails(*(arg.format(model=plain_folder) for arg in args))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nowhere", "error: MODEL must be a folder that exists"),
        (str(Path(__file__).parent), "error: MODEL must be a folder with a config.json"),
        (__file__, "error: MODEL must be a folder or a Hub id, such as "),
    ],
)
@pytest.mark.parametrize("command", ["check", "chat", "generate", "serve"])
def test_wrong_models(fails, command, model, said):
    assert said in fails(command, model)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--dtype", "int8", "unknown dtype 'int8'"),
        ("--device", "toaster", "--device must be one that torch can use here (got 'toaster'"),
        ("--max-new-tokens", "513", "must fit into the model's 512 positions"),
    ],
)
def test_wrong_values_for_a_model(fails, plain_folder, option, value, said):
    line = fails("generate", plain_folder, option, value, stdin="text")
    assert said in line


def test_what_nobody_foresaw_keeps_its_traceback(run, plain_folder, monkeypatch):
    def broken(*_args, **_kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(generate_module, "_write", broken)
    with pytest.raises(KeyError, match="a bug"):
        run("generate", plain_folder, stdin="text")


def test_ctrl_c_ends_it_quietly(run, plain_folder, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "_write", interrupted)
    result = run("generate", plain_folder, stdin="text")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr == f"Loading {plain_folder} ...\n"
