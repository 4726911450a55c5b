"""A Valkey of a benchmark's own, for a worker that is measured by itself.

It listens on a socket file in a folder of its own user, and on no port. It ends with the
process that started it, even if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from baton.errors import Unavailable
from baton.valkey_binary import valkey_binary
from loadtest.common.process_group import ending_with_parent, last_lines, process_group

_START_S = 10.0
_STORE_POLL_S = 0.02


@contextlib.contextmanager
def bench_store(folder: Path) -> Iterator[str]:
    """Its URL. ``folder`` is the caller's own, with a short path.

    Raises ConfigError where there is no Valkey, Unavailable where it does not come up.
    """
    socket, log = folder / "valkey.sock", folder / "valkey.log"
    options = ("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "600")
    nothing_on_disk = ("--save", "", "--appendonly", "no", "--dir", str(folder))
    command = ending_with_parent((valkey_binary(), *options, *nothing_on_disk))
    with process_group(command, os.environ, log) as process:
        url = f"unix://{socket}"
        deadline = time.monotonic() + _START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"Valkey does not answer:\n{last_lines(log)}")
            time.sleep(_STORE_POLL_S)
        yield url


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=1.0) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False
