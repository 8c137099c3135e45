"""How commands are found, and how errors end them."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from selfspec.errors import CliError, SelfSpecError, one_line, unknown_name

_USER_ERROR = 2
_INTERRUPTED = 130


class Commands(TyperGroup):
    """Answers what the user got wrong with one line and exit status 2, not with a panel."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command. An error that nobody foresaw keeps its traceback."""
        extra["standalone_mode"] = False
        try:
            status = super().main(*args, **extra)
        except SelfSpecError as error:
            status = _complain(str(error))
        except (typer.Abort, KeyboardInterrupt):
            status = _INTERRUPTED
        except Exception as error:
            # Newer typers bring a click of their own, so the class has no public name.
            if not hasattr(error, "format_message"):
                raise
            status = _complain(error.format_message())
        if not standalone_mode:
            return status
        sys.exit(status if isinstance(status, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command that was named, or suggests the nearest one."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise CliError(unknown_name("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


def _complain(message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return _USER_ERROR
