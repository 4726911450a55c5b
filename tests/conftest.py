"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal

import pytest

# Whoever asks Ray something where there is none is told so; by itself Ray would start a cluster in
# the process of the tests, and leave it there.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# A job in the background ignores SIGINT, and so would all that it starts: Ctrl-C would end nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: no later search for garbage, of a second each, looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """At its end the interpreter clears up all there is, or triton reports what it leaves."""
    gc.unfreeze()
