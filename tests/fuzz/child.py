"""One target under atheris (libFuzzer), until its time is up or it finds a fault.

python -m tests.fuzz.child TARGET CORPUS [libFuzzer's options]
"""

from __future__ import annotations

import logging
import sys

import atheris

from tests.fuzz.target import judged
from tests.fuzz.targets import TARGETS


def main() -> None:
    """Ends with libFuzzer's own exit code."""
    target = TARGETS[sys.argv[1]]
    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=list(target.rooms)):
        one = judged(target)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
