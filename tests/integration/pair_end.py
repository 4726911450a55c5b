"""One end of a pair of workers that does nothing but move blocks over a process group.

    python -m tests.integration.pair_end BACKEND DEVICE     serves ``LocalEnd`` over stdio

Each line in is a JSON list, a method's name and its arguments; each line out is what it returned.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from baton.errors import BatonError, Unavailable
from kvtransfer.memory.memory import BlockMemory, HostMemory
from kvtransfer.transports.process_group.transport import Backend, GroupTransport
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import (
    AnnouncedBatch,
    Packed,
    Parts,
    Peer,
    ReceiveLink,
    SendLink,
)
from worker.device.gpu_memory import GpuMemory

ROOT = Path(__file__).resolve().parents[2]
BLOCK_BYTES = 1 << 20
HALF = 64
"""The first blocks are sources, as many behind them targets."""
DEADLINE_S = 60.0
_ANSWER_S = 90.0
_END_S = 10.0


def _blocks(device: str, seed: int) -> BlockMemory:
    """Random ones on any device."""
    generator = torch.Generator().manual_seed(seed)
    # Whole words, which are drawn faster than as many bytes.
    most = torch.iinfo(torch.int64).max
    words = torch.randint(most, (2 * HALF, BLOCK_BYTES // 8), generator=generator)
    blocks = words.view(torch.uint8).to(device)
    return GpuMemory(blocks) if blocks.is_cuda else HostMemory(blocks.numpy())


class PairEnd(Protocol):
    """Both directions of a pair. Batches are of the first ``count`` blocks, and have numbers."""

    def offer(self) -> str:
        """Of its transport."""

    def accept(self, offer: str) -> str:
        """Receive from the other end from now on. Returns the answer."""

    def connect(self, answer: str) -> None:
        """Send to the other end from now on."""

    def pack(self, number: int, count: int) -> None:
        """Make a batch of ``count`` blocks ready."""

    def send(self, number: int, deadline_s: float = DEADLINE_S) -> None:
        """Begin to send a batch that is packed."""

    def receive(self, number: int, count: int, deadline_s: float = DEADLINE_S) -> None:
        """Begin to receive a batch of ``count`` blocks."""

    def wait(self, side: str, number: int) -> str:
        """Until a batch is over at ``side``, send or receive. Returns the error's class, or ""."""

    def close_links(self) -> None:
        """Close both directions."""


class LocalEnd:
    """In this process."""

    def __init__(self, backend: Backend, device: str, seed: int) -> None:
        """Raises ConfigError where the machine cannot do it."""
        self.memory = _blocks(device, seed)
        self._transport = GroupTransport(backend)
        self._transport.register(self.memory)
        self._sender: SendLink | None = None
        self._receiver: ReceiveLink | None = None
        self._packed: dict[int, Packed] = {}
        self._transfers: dict[tuple[str, int], Transfer] = {}

    def offer(self) -> str:
        """See ``PairEnd``."""
        return self._transport.offer().decode()

    def accept(self, offer: str) -> str:
        """See ``PairEnd``."""
        self._receiver, answer = self._transport.accept(_PEER, offer.encode())
        return answer.decode()

    def connect(self, answer: str) -> None:
        """See ``PairEnd``."""
        self._sender = self._transport.connect(_PEER, answer.encode())

    def pack(self, number: int, count: int) -> None:
        """See ``PairEnd``."""
        assert self._sender is not None
        parts = Parts(tuple(range(count)), 0, BLOCK_BYTES)
        self._packed[number] = self._sender.pack(number, parts)

    def send(self, number: int, deadline_s: float = DEADLINE_S) -> None:
        """See ``PairEnd``."""
        assert self._sender is not None
        packed = self._packed.pop(number)
        self._transfers["send", number] = self._sender.send(number, packed, deadline_s)

    def receive(self, number: int, count: int, deadline_s: float = DEADLINE_S) -> None:
        """See ``PairEnd``."""
        assert self._receiver is not None
        source = Parts(tuple(range(count)), 0, BLOCK_BYTES)
        target = Parts(tuple(range(HALF, HALF + count)), 0, BLOCK_BYTES)
        batch = AnnouncedBatch(number, source, target, ())
        self._transfers["receive", number] = self._receiver.receive(batch, deadline_s)

    def wait(self, side: str, number: int) -> str:
        """See ``PairEnd``."""
        try:
            self._transfers.pop((side, number)).wait(_ANSWER_S)
        except (BatonError, TimeoutError) as error:
            return type(error).__name__
        return ""

    def close_links(self) -> None:
        """See ``PairEnd``."""
        for link in (self._sender, self._receiver):
            if link is not None:
                link.close()

    def close(self) -> None:
        """Give everything back."""
        self._transport.close()


class RemoteEnd:
    """In a process of its own, which ends with this object's ``close`` or with this process."""

    def __init__(self, backend: Backend, device: str) -> None:
        # This Python and this module.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.pair_end", backend, device],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._line = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def offer(self) -> str:
        """See ``PairEnd``."""
        return str(self._ask("offer"))

    def accept(self, offer: str) -> str:
        """See ``PairEnd``."""
        return str(self._ask("accept", offer))

    def connect(self, answer: str) -> None:
        """See ``PairEnd``."""
        self._ask("connect", answer)

    def pack(self, number: int, count: int) -> None:
        """See ``PairEnd``."""
        self._ask("pack", number, count)

    def send(self, number: int, deadline_s: float = DEADLINE_S) -> None:
        """See ``PairEnd``."""
        self._ask("send", number, deadline_s)

    def receive(self, number: int, count: int, deadline_s: float = DEADLINE_S) -> None:
        """See ``PairEnd``."""
        self._ask("receive", number, count, deadline_s)

    def wait(self, side: str, number: int) -> str:
        """See ``PairEnd``."""
        return str(self._ask("wait", side, number))

    def close_links(self) -> None:
        """See ``PairEnd``."""
        self._ask("close_links")

    def close(self) -> None:
        """End the process; it is killed if it does not end by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, method: str, *arguments: object) -> Any:
        """Raises Unavailable with what went wrong in the other process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        except OSError as error:
            raise Unavailable(f"the other process is gone: {error}") from error
        answer = json.loads(self._read_line())
        if "error" in answer:
            raise Unavailable(f"in the other process: {answer['error']}")
        return answer["result"]

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        until = time.monotonic() + _ANSWER_S
        while b"\n" not in self._line:
            left_s = until - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise Unavailable(f"the other process did not answer within {_ANSWER_S:.0f} s")
            data = self._process.stdout.read(1 << 16)
            if not data:
                raise Unavailable("the other process has ended")
            self._line += data
        line, _, self._line = self._line.partition(b"\n")
        return line


def link(writer: PairEnd, receiver: PairEnd) -> None:
    """Connect one direction."""
    writer.connect(receiver.accept(writer.offer()))


_PEER = Peer("self-test", "the other process")
_METHODS = (
    "offer", "accept", "connect", "pack", "send", "receive", "wait", "close_links",
)  # fmt: skip


def serve(backend: Backend, device: str) -> None:
    """Until standard input ends."""
    with contextlib.ExitStack() as stack:
        end: LocalEnd | None = None
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            try:
                if end is None:
                    end = stack.enter_context(contextlib.closing(LocalEnd(backend, device, 2)))
                if method not in _METHODS:
                    raise Unavailable(f"there is no {method}")
                answer = {"result": getattr(end, method)(*arguments)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])  # type: ignore[arg-type]
