"""The `selfspec` command, its subcommands, and how errors end them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from cyclopts import App, CycloptsError, UnusedCliTokensError

from selfspec.cli.batch import batch
from selfspec.cli.cache import cache, prepare
from selfspec.cli.chat import chat
from selfspec.cli.check import check, demo
from selfspec.cli.generate import generate
from selfspec.cli.options import GENERAL
from selfspec.cli.serve import serve
from selfspec.errors import SelfSpecError, one_line

_USER_ERROR = 2
_INTERRUPTED = 130


app = App(
    name="selfspec",
    help="Text from a language model in fewer forwards; in float32 it is the same text.",
    version=lambda: f"selfspec {version('selfspec')}",
    version_flags=("--version", "-V"),
    help_format="markdown",
    group_arguments=GENERAL,
    group_parameters=GENERAL,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)
# In the order in which most people need them.
_COMMANDS: Sequence[Callable[..., object]] = (demo, check, chat, generate, batch, serve, prepare)
for order, command in enumerate(_COMMANDS):
    app.command(command, sort_key=order)
app.command(cache)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A model writes characters that not every terminal can show.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit status.

    A mistake of the user is one line and status 2, and so are a file that can't be opened and a
    full disk. Any other error keeps its traceback.
    """
    try:
        status = app(arguments)
        return status if isinstance(status, int) else 0
    except UnusedCliTokensError as error:
        return _complain(f"unknown argument {(error.unused_tokens or [''])[0]!r}; see --help")
    except (SelfSpecError, CycloptsError) as error:
        return _complain(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # The reader of stdout has left. Python must not try to flush it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        name = "" if error.filename is None else f"{error.filename}: "
        return _complain(f"{name}{error.strerror}")


def _complain(message: object) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return _USER_ERROR
