"""Settings of the C library and the interpreter for the process of a worker or a router."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SWITCH_INTERVAL_S = 0.0005
"""Maximum seconds for which one thread keeps the interpreter from another.

With the default of 5 ms, a decode step that has ended would wait for the event loop.
"""


_GARBAGE_OBJECTS = 10_000
"""Number of new container objects after which the youngest ones are searched for garbage."""


def keep_buffers() -> None:
    """Set malloc to keep freed buffers of some size for reuse, if mallopt(3) is available.

    Otherwise a message of a megabyte is returned to the system as soon as it is sent, and the
    kernel clears the next one's pages again. That is a third of the time that gRPC takes for a
    message, and half of the time of a routing decision over 10,000 workers, whose columns are as
    large.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def spare_the_interpreter() -> None:
    """Let threads switch sooner, exclude all objects that exist now from garbage collection, and
    make collections rarer.

    A search of these objects would only delay steps. Later ones include the token lists of all
    sequences: a search of 512 sequences of 32k tokens takes 0.17 s. Requests leave few cycles.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS, 10, 50)
