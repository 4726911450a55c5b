"""How the dispatcher sees a worker: in blocks of the prefix index."""

from __future__ import annotations

import pytest

from baton.registry import WorkerRecord
from baton.request import Geometry, LoadSnapshot
from router.dispatcher import _candidate
from router.worker_links import WorkerLink

HASH_BLOCK = 16


@pytest.mark.parametrize(
    ("block_size", "held", "available_blocks", "held_blocks"),
    [(16, 5, 10, 5), (32, 5, 20, 4), (64, 3, 40, 0), (64, 4, 40, 4)],
)
async def test_counts_are_in_hash_blocks(
    block_size: int, held: int, available_blocks: int, held_blocks: int
) -> None:
    """The first part of a larger block cannot be pinned, and does not count as held."""
    record = WorkerRecord(
        incarnation="d",
        slot="decode-0",
        role="decode",
        address="127.0.0.1:1",
        metrics_address="",
        model="tiny",
        fingerprint="f",
        geometry=Geometry(block_size, 2, 3, 64, "bfloat16"),
        context_length=2048,
        total_blocks=100,
        max_sequences=8,
        load=LoadSnapshot(free_blocks=7, cached_blocks=3),
    )
    link = WorkerLink(record)
    try:
        found = _candidate(link, {"d": held, "p": 9}, HASH_BLOCK)
    finally:
        await link.channel.close()
    assert (found.available_blocks, found.held_blocks) == (available_blocks, held_blocks)
