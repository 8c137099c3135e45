"""Runs the commands as `python -m selfspec`, in case `selfspec` is not on the path."""

from selfspec.cli.app import main

main()
