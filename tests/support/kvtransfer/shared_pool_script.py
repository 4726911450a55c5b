"""Run in a process of its own: ``python -m tests.support.kvtransfer.shared_pool_script``.

Holds a pool until its input ends. Prints its process id, descriptor, inode and the size of its
file; each line of input is a byte to fill it with, and is answered by that byte.
"""

from __future__ import annotations

import os
import sys

from kvtransfer.memory.shared_pool import allocate, inode_of

SIZE = (1 << 20) + 64

if __name__ == "__main__":
    pool = allocate(SIZE)
    pool.data[:] = 7
    file = pool.file
    print(os.getpid(), file.descriptor, inode_of(file), file.bytes, flush=True)  # noqa: T201
    for line in sys.stdin:
        pool.data[:] = int(line)
        print(int(line), flush=True)  # noqa: T201
