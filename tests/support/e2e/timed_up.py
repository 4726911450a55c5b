"""Shared by the tests of timed up and by other tests."""

from __future__ import annotations

import sys

PROGRAM = (sys.executable, "-m", "loadtest.research.validation.timed_up")
