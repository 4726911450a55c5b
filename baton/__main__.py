"""`python -m baton` is the command `baton`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if not sys.flags.safe_path:
    # Python puts the current folder first: a router.py or worker/ there would replace Baton's.
    del sys.path[0]
    own = str(Path(__file__).parents[1])
    if own not in sys.path:
        sys.path.append(own)

# By name: the command line is the highest layer, and nothing below it imports it.
import_module("deploy.cli.main").main()
