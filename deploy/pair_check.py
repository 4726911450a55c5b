"""Does a process group move blocks between two devices, and how fast?

Two processes form a pair, send batches both ways with checksums, abort one that is under way, and
form the pair again. With ``nccl`` it needs two GPUs and has not been run by us; with ``gloo`` the
same steps run on any machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from baton.errors import Unavailable
from deploy.pair_end import BLOCK_BYTES, HALF, LocalEnd, PairEnd, RemoteEnd
from kvtransfer.group_transport import Backend

BLOCK_COUNTS = (1, 8, HALF)
_ABORTED = "WorkerFailed"


@dataclass(frozen=True, slots=True)
class PairStep:
    """One thing that was tried and went well."""

    what: str
    bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """In 10^9 bytes."""
        return self.bytes / self.seconds / 1e9


def check_pair(backend: Backend, devices: tuple[str, str]) -> Generator[PairStep, None, None]:
    """Each step when it is done. Raises BatonError for the first that fails."""
    with (
        contextlib.closing(RemoteEnd(backend, devices[1])) as there,
        contextlib.closing(LocalEnd(backend, devices[0], seed=1)) as here,
    ):
        for name in ("first pair", "pair formed again"):
            link(here, there)
            link(there, here)
            yield from _both_ways(name, here, there)
            yield _abort(here, there)


def link(writer: PairEnd, receiver: PairEnd) -> None:
    """Connect one direction."""
    writer.connect(receiver.accept(writer.offer()))


def _both_ways(name: str, here: PairEnd, there: PairEnd) -> Iterator[PairStep]:
    number = 0
    for arrow, writer, receiver in (("1 → 2", here, there), ("2 → 1", there, here)):
        for count in BLOCK_COUNTS:
            number += 1
            seconds = _move(writer, receiver, number, count)
            yield PairStep(f"{name}, {arrow}", count * BLOCK_BYTES, seconds)


def _move(writer: PairEnd, receiver: PairEnd, number: int, count: int) -> float:
    """Seconds from the first byte to the last that is in place and verified."""
    receiver.receive(number, writer.pack(number, count))
    begun = time.perf_counter()
    writer.send(number)
    failures = receiver.wait("receive", number), writer.wait("send", number)
    seconds = time.perf_counter() - begun
    if any(failures):
        raise Unavailable(
            f"a batch of {count} blocks failed: {failures[0] or 'nothing'} at the receiver, "
            f"{failures[1] or 'nothing'} at the writer"
        )
    return seconds


def _abort(here: PairEnd, there: PairEnd) -> PairStep:
    """Close a pair while a receiver waits for a batch that is never sent."""
    number = 1 + 2 * len(BLOCK_COUNTS)
    here.receive(number, [0] * HALF)
    begun = time.perf_counter()
    here.close_links()
    found = here.wait("receive", number)
    seconds = time.perf_counter() - begun
    there.close_links()
    if found != _ABORTED:
        raise Unavailable(f"an aborted batch ended with {found or 'success'}, not {_ABORTED}")
    return PairStep("aborted", 0, seconds)
