"""The command as a whole: help, version, mistakes, and how it ends."""

import subprocess
import sys

import pytest

import selfspec
from selfspec.cli import generate as generate_module

COMMANDS = [("demo",), ("check",), ("chat",), ("generate",), ("batch",), ("serve",)]
CACHE_COMMANDS = [("cache", "build"), ("cache", "inspect"), ("cache", "merge")]
# The keys of a recipe are many.
_LONG = {("cache", "build"): 75}
_LIGHT = """
import sys
from selfspec.cli import main
sys.argv[1:] = {args}
try:
    main()
finally:
    print(*{{"torch", "transformers", "datasets"}} & set(sys.modules))
"""


def python(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", [(), ("cache",), *COMMANDS, *CACHE_COMMANDS])
def test_help_is_on_one_screen(run, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) <= _LONG.get(words, 40)
    for hidden in ("--width-decay", "--depth-decay", "--threshold", "--update-interval"):
        assert hidden not in result.stdout


@pytest.mark.parametrize("args", [["cache", "build", "--help"], ["generate", "m", "nowhere"]])
def test_help_and_complaints_need_no_torch(args):
    done = python("-c", _LIGHT.format(args=args))
    assert done.stdout.splitlines()[-1] == "", done.stderr


def test_version_as_a_module():
    done = python("-m", "selfspec.cli", "--version")
    assert (done.returncode, done.stdout) == (0, f"selfspec {selfspec.__version__}\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["check", "{model}", "--wat"], "--wat"),
        (["generate", "{model}", "--max-nodes", "many"], "--max-nodes"),
        (["generate", "{model}", "--max-nodes", "0"], "max_nodes must be >= 1 (got 0)"),
        (["generate", "{model}", "--sources", "lutt"], "did you mean 'lut'?"),
        (["generate", "{model}", "--temperature", "-1"], "--temperature"),
        (["generate", "{model}", "--max-memry", "1GB"], "Did you mean --max-memory?"),
        (["generate", "{model}", "--max-memory", "lots"], "--max-memory must be a number of"),
        (["generate", "{model}", "--draft-model", "./no"], "--draft-model must be a folder with"),
        (["generate"], "MODEL"),
        (["batch", "{model}", "in.jsonl"], "OUTPUT"),
        (["demo", "--dtype", "int8"], "--dtype"),
        (["generate", "{model}", "--budget", "fitted"], "--budget"),
        (["demoo"], 'Did you mean "demo"?'),
        (["check", "./nowhere"], "MODEL must be a folder with a config.json, or a Hub id such as"),
        (["serve", __file__], "MODEL must be a folder with a config.json"),
        (["cache", "build", "/", "out", "--recipe", "code"], "MODEL must be a folder with"),
    ],
)
def test_mistakes_are_one_line(fails, plain_folder, args, said):
    assert said in fails(*(arg.format(model=plain_folder) for arg in args))


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyError("a bug"), None), (OSError(5, "I/O"), None), (KeyboardInterrupt, 130)],
)
def test_what_nobody_foresaw_keeps_its_traceback(run, plain_folder, monkeypatch, error, status):
    def broken(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(generate_module, "_write", broken)
    if status is None:
        with pytest.raises(type(error)):
            run("generate", plain_folder, stdin="text")
    else:
        assert run("generate", plain_folder, stdin="text").exit_code == status
