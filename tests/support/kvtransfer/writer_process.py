"""A writer that can be stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtransfer.transports.transport import AnnouncedBatch, Parts, Peer
from tests.support.kvtransfer.ends import BLOCK_BYTES, DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]


class WriterProcess:
    """``writer_script`` and its ends of the pipes."""

    def __init__(self, transport: str, seed: int, receiver: str = "receiver") -> None:
        self.peer = Peer(f"writer-{seed}", "")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.kvtransfer.writer_script",
                transport,
                str(seed),
                receiver,
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.offer = bytes.fromhex(self.said())

    def connect(self, answer: bytes) -> None:
        """Tell it what the receiver has answered."""
        self.tell(answer.hex())

    def pack(
        self, number: int, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> AnnouncedBatch:
        """Have it pack whole blocks; the batch as it is announced to the receiver."""
        self.tell(["pack", [number, list(sources)]])
        checksums, staged_at = self.said()
        return AnnouncedBatch(
            number,
            Parts(sources, 0, BLOCK_BYTES),
            Parts(targets, 0, BLOCK_BYTES),
            tuple(checksums),
            staged_at,
        )

    def send(self, number: int) -> None:
        """Have it send what it packed first; ``said`` tells the end of that."""
        self.tell(["send", number])

    def tell(self, what: object) -> None:
        """A line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def said(self) -> Any:
        """The next line of JSON."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        """SIGSTOP; returns once it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def wake(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns once it has ended."""
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        """End it, whatever its state; idempotent."""
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)
