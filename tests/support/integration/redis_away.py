"""Shared by the tests of redis away and by other tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import redis


@contextmanager
def stopped(url: str) -> Iterator[None]:
    """The server sleeps, and its connections stay."""
    with redis.Redis.from_url(url) as client:
        server = int(cast(Any, client.info("server"))["process_id"])
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)
