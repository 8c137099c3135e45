"""`python -m selfspec.cli`, for where the `selfspec` script is not on the path."""

from selfspec.cli.app import main

main()
