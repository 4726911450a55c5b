"""Which host an offer names, and links whose receiver reads the writer's blocks."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.errors import ChecksumMismatch, HandoffError, WorkerFailed
from kvtransfer.transports.in_place import ReadReceiveLink, are_on_two_hosts, host_of
from kvtransfer.transports.transport import AnnouncedBatch, Parts

DEADLINE_S = 10.0

HERE = json.dumps({"boot_id": "here", "pid": 1}).encode()


def test_a_process_knows_its_host_and_namespace() -> None:
    boot_id, pid_namespace = host_of("shm")
    assert boot_id
    assert pid_namespace.startswith("pid:[")


def test_a_process_without_descriptors_still_knows_its_host() -> None:
    """It asked when it registered its blocks. Links of later handoffs ask again."""
    known = host_of("shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Path("/proc/self/status").read_text()
        assert host_of("shm") == known
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_offers_that_name_two_hosts() -> None:
    assert are_on_two_hosts(HERE, json.dumps({"boot_id": "there"}).encode())
    assert not are_on_two_hosts(HERE, json.dumps({"boot_id": "here", "pid": 2}).encode())


@pytest.mark.parametrize("other", [b"", b"{}", b"[1]", b"3", b"\xff", b"[" * 100_000])
def test_an_offer_that_names_no_host_may_be_of_this_one(other: bytes) -> None:
    assert not are_on_two_hosts(HERE, other)
    assert not are_on_two_hosts(other, HERE)


class FourBlocks:
    """Of 64 bytes each; every copy has checksum 7."""

    blocks = 4
    part_end = 64

    def copy(self, batch: AnnouncedBatch) -> tuple[int, ...]:
        return (7,) * len(batch.target.blocks)


@pytest.fixture
def link() -> Iterator[ReadReceiveLink[FourBlocks]]:
    with ThreadPoolExecutor(1) as executor:
        yield ReadReceiveLink(FourBlocks(), executor)


def batch(
    first: int, offset: int = 0, length: int = 64, checksums: tuple[int, ...] = ()
) -> AnnouncedBatch:
    blocks = (first, first + 1)
    return AnnouncedBatch(
        0, Parts(blocks, offset, length), Parts((0, 1), offset, length), checksums
    )


@pytest.mark.parametrize(
    "outside", [batch(3), batch(-1), batch(0, 32, 64), batch(0, -8, 8), batch(0, 0, 0)]
)
def test_what_the_writer_does_not_have_is_not_read(
    link: ReadReceiveLink[FourBlocks], outside: AnnouncedBatch
) -> None:
    with pytest.raises(HandoffError, match="outside its writer's blocks"):
        link.receive(outside, DEADLINE_S).wait(DEADLINE_S)


def test_checksums_are_compared_if_they_are_known(link: ReadReceiveLink[FourBlocks]) -> None:
    unknown = link.receive(batch(2), DEADLINE_S)
    unknown.wait(DEADLINE_S)
    assert unknown.found == (7, 7)
    link.receive(batch(2, checksums=(7, 7)), DEADLINE_S).wait(DEADLINE_S)
    with pytest.raises(ChecksumMismatch):
        link.receive(batch(2, checksums=(7, 8)), DEADLINE_S).wait(DEADLINE_S)


def test_a_closed_link_reads_nothing(link: ReadReceiveLink[FourBlocks]) -> None:
    link.close()
    link.close()
    with pytest.raises(WorkerFailed, match="the pair was closed"):
        link.receive(batch(0), DEADLINE_S).wait(DEADLINE_S)
