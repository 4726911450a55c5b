"""Process groups whose other process is killed or stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.pair_end import BLOCK_BYTES, HALF, LocalEnd, RemoteEnd, link

LONG_S = 60.0
SHORT_S = 1.0
COUNT = HALF
"""Blocks of a batch that takes many messages."""


@dataclass
class Pair:
    here: LocalEnd
    there: RemoteEnd


@pytest.fixture
def pair() -> Iterator[Pair]:
    threads = set(threading.enumerate())
    before = open_sockets()
    there = RemoteEnd("gloo", "cpu")
    with contextlib.closing(there), contextlib.closing(LocalEnd("gloo", "cpu", seed=1)) as here:
        link(here, there)
        link(there, here)
        try:
            yield Pair(here, there)
            here.close_links()
            # Whatever state the other process is in.
            assert eventually(lambda: set(threading.enumerate()) <= threads)
            assert eventually(lambda: open_sockets() <= before)  # another test's may go
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(there.pid, signal.SIGCONT)


def open_sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += entry.readlink().name.startswith("socket:")
    return found


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + LONG_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def target_sums(end: LocalEnd) -> list[int]:
    memory = end.memory
    return [memory.checksum(block, 0, BLOCK_BYTES) for block in range(HALF, 2 * HALF)]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] == "T")


def form(pair: Pair) -> None:
    """Move a batch each way."""
    for number, writer, receiver in ((1, pair.here, pair.there), (2, pair.there, pair.here)):
        writer.pack(number, 2)
        receiver.receive(number, 2)
        writer.send(number)
        assert receiver.wait("receive", number) == ""
        assert writer.wait("send", number) == ""


@pytest.mark.parametrize("formed", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_killed_peer_fails_transfers_in_flight(pair: Pair, side: str, formed: bool) -> None:
    if formed:
        form(pair)
    if side == "send":
        pair.here.pack(3, COUNT)
        pair.here.send(3, LONG_S if formed else SHORT_S)
    else:
        pair.here.receive(3, COUNT, LONG_S if formed else SHORT_S)
    os.kill(pair.there.pid, signal.SIGKILL)
    # A writer that was never there has no connection that could end: the control stream's does.
    expected = {"WorkerFailed"} if formed else {"WorkerFailed", "DeadlineExceeded"}
    assert pair.here.wait(side, 3) in expected


@pytest.mark.parametrize("formed", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("side", ["send", "receive"])
def test_a_stopped_peer_fails_at_the_deadline(pair: Pair, side: str, formed: bool) -> None:
    if formed:
        form(pair)
    stop(pair.there.pid)
    if side == "send":
        pair.here.pack(3, COUNT)
        pair.here.send(3, SHORT_S)
    else:
        pair.here.receive(3, COUNT, SHORT_S)
    assert pair.here.wait(side, 3) == "DeadlineExceeded"


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_a_writer_that_ends_midway(pair: Pair, end: signal.Signals) -> None:
    """After some of a batch's messages; a new pair with another process serves."""
    form(pair)
    pair.there.pack(3, COUNT)
    pair.here.receive(3, COUNT, 2 * SHORT_S)
    pair.there.send(3, LONG_S)
    os.kill(pair.there.pid, end)
    # It may have been quick.
    expected = {signal.SIGKILL: "WorkerFailed", signal.SIGSTOP: "DeadlineExceeded"}[end]
    assert pair.here.wait("receive", 3) in {"", expected}
    pair.here.close_links()
    with contextlib.closing(RemoteEnd("gloo", "cpu")) as another:
        link(another, pair.here)
        another.pack(4, COUNT)
        pair.here.receive(4, COUNT)
        another.send(4)
        assert pair.here.wait("receive", 4) == ""
        pair.here.close_links()


def test_a_stopped_writer_that_wakes_writes_nothing(pair: Pair) -> None:
    form(pair)
    pair.there.pack(3, COUNT)
    pair.there.send(3, LONG_S)
    stop(pair.there.pid)
    pair.here.receive(3, COUNT, SHORT_S)
    found = pair.here.wait("receive", 3)
    assert found in {"", "DeadlineExceeded"}
    before = target_sums(pair.here)
    os.kill(pair.there.pid, signal.SIGCONT)
    assert pair.there.wait("send", 3) in {"", "WorkerFailed"}
    assert target_sums(pair.here) == before


def test_a_writer_that_stops_while_the_pair_is_formed(pair: Pair) -> None:
    pair.there.pack(3, COUNT)
    pair.there.send(3, LONG_S)
    stop(pair.there.pid)
    pair.here.receive(3, COUNT, SHORT_S)
    assert pair.here.wait("receive", 3) == "DeadlineExceeded"


@pytest.mark.long
def test_a_receiver_that_stops_while_the_pair_is_formed(pair: Pair) -> None:
    pair.here.pack(3, COUNT)
    pair.there.receive(3, COUNT, LONG_S)
    stop(pair.there.pid)
    pair.here.send(3, SHORT_S)
    assert pair.here.wait("send", 3) == "DeadlineExceeded"


@pytest.mark.long
@pytest.mark.parametrize("side", ["send", "receive"])
def test_links_close_while_the_peer_is_stopped(pair: Pair, side: str) -> None:
    form(pair)
    stop(pair.there.pid)
    if side == "send":
        pair.here.pack(3, COUNT)
        pair.here.send(3, LONG_S)
    else:
        pair.here.receive(3, COUNT, LONG_S)
    pair.here.close_links()
    assert pair.here.wait(side, 3) == "WorkerFailed"
