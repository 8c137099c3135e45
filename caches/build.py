"""Builds a cache folder: the same command as `selfspec cache build`, run from a checkout.

python caches/build.py MODEL FOLDER --recipe caches/recipes/folder.toml --data ~/notes
"""

import sys

from selfspec.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["cache", "build"]
    main()
