"""The end of this process: at once, whatever its threads do, or with its parent."""

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
"""Ends the process and logs the reason, from any thread: ``fail``, or a recorder of a test's."""


def fail(reason: str) -> NoReturn:
    """End at once, and say why, even where there is no memory to say it."""
    try:
        log.error("%s", reason)
    finally:
        end_process()


def end_process(code: int = 1) -> NoReturn:
    """At once, whatever its threads do."""
    # Not sys.exit: Ray would catch it, and threads inside torch would keep the process.
    try:
        logging.shutdown()
    finally:
        os._exit(code)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
