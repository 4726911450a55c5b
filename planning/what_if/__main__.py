"""Answers one what-if question: reads it from standard input, writes the answer, and ends.

python -m planning.what_if < question.json

It gives way to whatever serves on the machine, and ends itself when nobody can be waiting any more.
"""

from __future__ import annotations

import os
import signal
import sys

from baton.errors import BatonError
from planning.what_if.answer import answer
from router.console.what_if import DEADLINE_S, WhatIfQuestion

_NICE = 10
_LATER_S = 10


def main() -> int:
    """Returns the exit code."""
    os.nice(_NICE)
    # The router ends it at the deadline; this is for a router that is gone.
    signal.alarm(int(DEADLINE_S) + _LATER_S)
    try:
        found = answer(WhatIfQuestion.model_validate_json(sys.stdin.buffer.read()))
    except BatonError as error:
        print(error.message, file=sys.stderr)  # noqa: T201 - whoever started it reads this
        return 1
    sys.stdout.write(found.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
