"""What a worker's process asks of the C library and of the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

from baton.config.choices import MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SWITCH_INTERVAL_S = 0.0005
"""How long one thread may keep the interpreter from another: a decode step that has ended must not
wait the default 5 ms for the event loop to let go."""


def keep_buffers() -> None:
    """Have the C library keep freed memory of some size, where it can be told to (mallopt(3)).

    A message of a megabyte would else be given back to the system as soon as it is sent, and the
    next one's pages be cleared by the kernel again: a third of what gRPC takes for it.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
        mallopt(_M_TRIM_THRESHOLD, 256 * MIB)


def spare_the_interpreter() -> None:
    """All that was loaded stays: looking through it for garbage would only stop the steps."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
