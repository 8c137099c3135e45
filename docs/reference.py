"""Makes the reference of the API from the docstrings: `python docs/reference.py FOLDER`.

Any warning is an error: a public name that can't be found, or a docstring that can't be read.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pdoc

import selfspec

# The names of `selfspec` itself, and what a source, a budget or a shape of one's own needs.
MODULES = (
    *("selfspec", "selfspec.draft.sources", "selfspec.draft.shape", "selfspec.cost"),
    *("selfspec.papers", "selfspec.records", "!selfspec.hub"),
)


def main(folder: str) -> None:
    """Writes the pages."""
    warnings.simplefilter("error")
    # Named tuples keep their annotations without the module in which to look them up.
    warnings.filterwarnings("ignore", message="Error parsing type annotation ForwardRef")
    for (
        name
    ) in selfspec.__all__:  # They are imported when first asked for; pdoc looks without asking.
        setattr(selfspec, name, getattr(selfspec, name))
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=Path(folder))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/reference.py FOLDER")
    main(sys.argv[1])
