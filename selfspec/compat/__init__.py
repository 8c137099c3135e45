"""The only package that uses private or versioned names of other libraries.

Each function has a plain name and says why it is needed and what happens without it. Tests call all
of them with the installed versions, most of them in `tests/compat`, and `tests/test_imports.py`
forbids such names elsewhere. Public names are used where they are needed.
"""
