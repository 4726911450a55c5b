"""Transport nixl between processes; one of them is killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from baton.errors import DeadlineExceeded, WorkerFailed
from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports.nixl.transport import NixlReceiveLink, NixlTransport
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Parts, Peer
from tests.integration.nixl_worker_script import (
    BLOCK_BYTES,
    BLOCKS,
    PATIENCE_S,
    WHOLE,
    random_blocks,
)

pytest.importorskip("nixl", reason="the extra nixl is not installed")

ROOT = Path(__file__).resolve().parents[2]
SEED = 5
SHARED_MEMORY = "tcp,sm,self"
TCP = "tcp,self"
"""Here the writer has to take part, so that one that is stopped is noticed."""


class Child:
    """A worker of its own process; with another's offer it reads from that."""

    def __init__(self, ways: str, *offer: bytes) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integration.nixl_worker_script", str(SEED)),
                *(data.hex() for data in offer),
            ],
            cwd=ROOT,
            env=os.environ | {"UCX_TLS": ways, "UCX_NET_DEVICES": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.offer = bytes.fromhex(self.says())

    def tell(self, what: object) -> None:
        """A line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


@dataclass
class Link:
    """The receiver's end, and the writer with the number that it has given to its own."""

    receive: NixlReceiveLink
    writer: Child
    number: int


class Receiver:
    """The worker of this process."""

    def __init__(self, ways: str) -> None:
        self.theirs = random_blocks(SEED)
        self.ours = np.zeros_like(self.theirs)
        self.transport = NixlTransport("receiver")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UCX_TLS", ways)
            patch.setenv("UCX_NET_DEVICES", "lo")
            self.transport.register(HostMemory(self.ours))
        self._number = 0

    def link(self, writer: Child) -> Link:
        receive, answer = self.transport.accept(Peer("writer", ""), writer.offer)
        writer.tell(["connect", answer.hex()])
        return Link(receive, writer, int(writer.says()))

    def packed(self, link: Link, *blocks: int) -> AnnouncedBatch:
        """As the writer announces it."""
        self._number += 1
        link.writer.tell(["pack", link.number, self._number, blocks])
        parts = Parts(blocks, 0, BLOCK_BYTES)
        return AnnouncedBatch(self._number, parts, parts, (), int(link.writer.says()))

    def receive(self, link: Link, *blocks: int) -> Transfer:
        return link.receive.receive(self.packed(link, *blocks), PATIENCE_S)

    def has(self, *blocks: int) -> bool:
        """Whether these have arrived, and nothing else."""
        rest = [block for block in range(BLOCKS) if block not in blocks]
        arrived = np.array_equal(self.ours[list(blocks)], self.theirs[list(blocks)])
        return arrived and not self.ours[rest].any()


@contextmanager
def child(ways: str, *offer: bytes) -> Iterator[Child]:
    child = Child(ways, *offer)
    yield child
    child.close()


@contextmanager
def receiver(ways: str) -> Iterator[Receiver]:
    before = set(threading.enumerate())
    receiver = Receiver(ways)
    yield receiver
    receiver.transport.close()
    # Those of others may end meanwhile.
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("ways", [SHARED_MEMORY, pytest.param(TCP, marks=pytest.mark.long)])
def test_a_writer_that_is_killed(ways: str) -> None:
    with receiver(ways) as here, child(ways) as one, child(ways) as other:
        link = here.link(one)
        here.receive(link, 0, 1).wait(PATIENCE_S)
        batch = here.packed(link, 2)
        one.kill()
        with pytest.raises(WorkerFailed):
            link.receive.receive(batch, PATIENCE_S).wait(PATIENCE_S)
        link.receive.close()
        # The others are none the worse for it.
        here.receive(here.link(other), 3).wait(PATIENCE_S)
        assert here.has(0, 1, 3)


@pytest.mark.long
def test_a_writer_that_is_killed_amid_reads() -> None:
    with receiver(TCP) as here, child(TCP) as writer:
        link = here.link(writer)
        here.receive(link, 0).wait(PATIENCE_S)
        batches = [here.packed(link, block) for block in range(1, BLOCKS)]
        writer.stop()
        transfers = [link.receive.receive(batch, PATIENCE_S) for batch in batches]
        assert not any(transfer.poll() for transfer in transfers)
        writer.kill()
        for transfer in transfers:
            with pytest.raises(WorkerFailed):
                transfer.wait(PATIENCE_S)
        assert here.has(0)


@pytest.mark.long
def test_a_writer_that_is_stopped_and_wakes() -> None:
    with receiver(TCP) as here, child(TCP) as writer, child(TCP) as other:
        link = here.link(writer)
        here.receive(link, 0).wait(PATIENCE_S)
        batch = here.packed(link, 1, 2, 3)
        writer.stop()
        late = link.receive.receive(batch, 0.3)
        with pytest.raises(DeadlineExceeded):
            late.wait(PATIENCE_S)
        # It delays no other transfer.
        here.receive(here.link(other), 5).wait(PATIENCE_S)

        writer.wake()
        here.receive(link, 4).wait(PATIENCE_S)
        link.receive.close()
        here.receive(here.link(writer), 6).wait(PATIENCE_S)
        assert here.has(0, 4, 5, 6)


@pytest.mark.long
def test_the_end_of_a_receiver_whose_writer_is_stopped() -> None:
    with child(TCP) as writer:
        with receiver(TCP) as here:
            link = here.link(writer)
            here.receive(link, 0).wait(PATIENCE_S)
            batch = here.packed(link, 1)
            writer.stop()
            transfer = link.receive.receive(batch, PATIENCE_S)
            link.receive.close()
            with pytest.raises(WorkerFailed):
                transfer.wait(PATIENCE_S)
        assert here.has(0)


def test_a_receiver_that_is_killed_amid_reads() -> None:
    with child(SHARED_MEMORY) as writer:
        with child(SHARED_MEMORY, writer.offer) as reader:
            writer.tell(["connect", reader.says()])
            writer.tell(["pack", int(writer.says()), 0, WHOLE.blocks])
            reader.tell(int(writer.says()))
            assert reader.says() == "reading"
            reader.kill()
        with receiver(SHARED_MEMORY) as here:
            here.receive(here.link(writer), *WHOLE.blocks).wait(PATIENCE_S)
            assert here.has(*WHOLE.blocks)
        assert writer.process.poll() is None
