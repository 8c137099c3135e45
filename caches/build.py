"""Builds a cache: the same command as `selfspec cache build`, run from a checkout.

python caches/build.py CACHE --recipe caches/recipes/folder.toml --data ~/notes
"""

import sys

from selfspec.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["cache", "build"]
    main()
