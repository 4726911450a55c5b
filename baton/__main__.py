"""`python -m baton` is the command `baton`."""

from __future__ import annotations

from importlib import import_module

# By name: the command line is the highest layer, and nothing below it imports it.
import_module("deploy.cli.main").main()
