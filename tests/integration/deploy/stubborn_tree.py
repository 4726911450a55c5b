"""A process whose descendants, like itself, ignore SIGTERM: ``stubborn_tree.py DEPTH``.

Prints a line when the whole tree is up.
"""

from __future__ import annotations

import signal
import subprocess
import sys


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    depth = int(sys.argv[1])
    if depth > 0:
        child = subprocess.Popen(
            [sys.executable, __file__, str(depth - 1)],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdout is not None
        child.stdout.readline()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
