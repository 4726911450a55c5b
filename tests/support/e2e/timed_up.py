"""What several tests use beside those of timed up."""

from __future__ import annotations

import sys

PROGRAM = (sys.executable, "-m", "loadtest.research.validation.timed_up")
