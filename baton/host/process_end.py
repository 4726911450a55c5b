"""Ends this process: immediately, whatever its threads do, or together with its parent."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Callable
from typing import NoReturn, TypeAlias

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

Fail: TypeAlias = Callable[[str], object]
"""Function that ends the process and logs the reason, from any thread: ``fail``, or a test's
recorder."""


def fail(reason: str) -> NoReturn:
    """End the process immediately and log the reason, even if no memory is left."""
    try:
        log.error("%s", reason)
    finally:
        end_process()


def end_process(code: int = 1) -> NoReturn:
    """End the process immediately, whatever its threads do."""
    # Not sys.exit: Ray would catch it, and threads inside torch would keep the process.
    try:
        logging.shutdown()
    finally:
        os._exit(code)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
