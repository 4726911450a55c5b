"""Transfers end when their link does; parts are compared as they are placed."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest

from baton.errors import ChecksumMismatch, WorkerFailed
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports.transfer import OpenTransfers, Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Parts, place

DEADLINE_S = 20.0


def test_the_end_of_a_link_ends_all_that_is_open_and_all_to_come() -> None:
    transfers = OpenTransfers()
    done, cancelled, pending, placing = (transfers.new() for _ in range(4))
    done.finish()
    cancelled.cancel()
    assert placing.begin()
    assert transfers.error is None
    first = WorkerFailed("first")
    transfers.end(first)
    transfers.end(WorkerFailed("second"))
    assert transfers.error is first
    assert done.poll()
    with pytest.raises(CancelledError):
        cancelled.poll()
    with pytest.raises(WorkerFailed, match="first"):
        pending.poll()
    assert not placing.poll(), "over while bytes were being placed"
    placing.pause()
    with pytest.raises(WorkerFailed, match="first"):
        placing.poll()
    late = transfers.new()
    assert not late.begin()
    with pytest.raises(WorkerFailed, match="first"):
        late.poll()


def test_what_is_over_is_not_kept() -> None:
    transfers = OpenTransfers()
    made = [transfers.new() for _ in range(3)]
    made[0].finish()
    made[1].cancel()
    made[2].fail(WorkerFailed("gone"))
    assert not transfers._open
    transfers.end(WorkerFailed("closed"))
    transfers.new()
    assert not transfers._open


def test_none_escapes_an_end_on_another_thread() -> None:
    for _ in range(50):
        transfers = OpenTransfers()
        together = threading.Barrier(2)
        made: list[Transfer] = []

        def make(
            transfers: OpenTransfers = transfers,
            together: threading.Barrier = together,
            made: list[Transfer] = made,
        ) -> None:
            together.wait(DEADLINE_S)
            made.extend(transfers.new() for _ in range(20))

        thread = threading.Thread(target=make)
        thread.start()
        together.wait(DEADLINE_S)
        transfers.end(WorkerFailed("closed"))
        thread.join(DEADLINE_S)
        for transfer in made:
            with pytest.raises(WorkerFailed):
                transfer.wait(DEADLINE_S)


def test_parts_are_what_was_announced_or_damaged() -> None:
    memory = HostMemory(np.zeros((2, 64), dtype=np.uint8))
    data = np.arange(64, dtype=np.uint8).data
    batch = AnnouncedBatch(7, Parts((0,), 0, 64), Parts((1,), 0, 64), (checksum(data),))
    assert place(memory, batch, data, [0]) == batch.checksums
    with pytest.raises(ChecksumMismatch, match="batch 7 arrived damaged"):
        place(memory, replace(batch, checksums=(5,)), data, [0])
