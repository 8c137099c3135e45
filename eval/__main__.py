"""`python -m eval`: measures decoding methods on a model, a bench and a machine of yours."""

from __future__ import annotations

import sys

from eval.command import main

if __name__ == "__main__":
    sys.exit(main())
