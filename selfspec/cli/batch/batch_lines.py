"""One line of a prompt file. `selfspec.serving.prompt_files` reads them."""

from selfspec.serving.prompt_files import read_line

__all__ = ["read_line"]
