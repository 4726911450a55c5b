"""What routers are told to run for the console's what-if questions: the simulator."""

from __future__ import annotations

import sys

WHAT_IF = (sys.executable, "-P", "-m", "planning.what_if")
"""A program and its arguments; see ``router.console.what_if``."""
