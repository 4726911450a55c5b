"""kvtransfer/transports/cuda_ipc_transport.py with the host's memory in place of GPUs'.

Where triton interprets (tests/kernels/test_cuda_ipc.py), the kernel that runs is the one of GPUs.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from baton.errors import ChecksumMismatch, ConfigError, HandoffError, WorkerFailed
from kvtransfer.memory import checksum_triton
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.cuda_ipc_transport import CudaIpcReceiveLink, CudaIpcTransport
from kvtransfer.transports.transport import AnnouncedBatch, Parts, Peer, Transport
from tests.support.kvtransfer.fake_cuda import Allocation, FakeCuda, gpu_uuid

PATIENCE_S = 30.0
BLOCKS, BLOCK_BYTES = 4, 256
LEAD = 512
"""Bytes of a pool's allocation before its blocks."""
WRITER = Peer("writer", "")
READER_GPU, OTHER_GPU = 5, 3


class GpuBlocks(HostMemory):
    """Blocks that say they are on a GPU, in an allocation that begins before them."""

    def __init__(self, seed: int) -> None:
        room = np.zeros(LEAD + BLOCKS * BLOCK_BYTES + 16, dtype=np.uint8)
        # As CUDA's allocations, it begins at a multiple of 16.
        self.allocation = room[-room.ctypes.data % 16 :][: LEAD + BLOCKS * BLOCK_BYTES]
        self.rows = self.allocation[LEAD:].reshape(BLOCKS, BLOCK_BYTES)
        self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape, np.uint8)
        super().__init__(self.rows)

    @property
    def device(self) -> str:
        return "cuda:0"


class FakeStream:
    """Everything has been done when it is asked for."""

    cuda_stream = 0

    def __init__(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)

    def synchronize(self) -> None:
        pass


def copied_by_host(target: int, source: int, size: int, device: torch.device) -> int:
    """In place of the kernel."""
    assert checksum_triton.can_copy_words(target, source, size)
    assert device == torch.device("cuda", 0)
    ctypes.memmove(target, source, size)
    return checksum(ctypes.string_at(target, size))


class Machine:
    """One host: a receiver on one GPU, and writers that are other processes."""

    def __init__(self, use: Callable[[FakeCuda], None], executor: Executor) -> None:
        self._use = use
        self._exports: dict[bytes, Allocation] = {}
        self.executor = executor
        self.theirs, self.ours = GpuBlocks(1), GpuBlocks(2)
        self.cuda = FakeCuda([READER_GPU], self._exports)
        """The receiver's driver, which sees one GPU alone."""
        self.receivers: list[CudaIpcTransport] = []

    def offer(self, gpu: int, **changes: Any) -> bytes:
        """A writer's, whose blocks are on ``gpu``; it sees that one alone."""
        writer = CudaIpcTransport(self.executor)
        offer = json.loads(self._registered(writer, self.theirs, gpu).offer())
        return json.dumps(offer | {"pid": os.getpid() + 1} | changes).encode()

    def receiver(self, *, between_gpus: bool = False) -> CudaIpcTransport:
        """A registered one."""
        transport = CudaIpcTransport(self.executor, between_gpus=between_gpus)
        self.receivers.append(transport)
        return self._registered(transport, self.ours, READER_GPU, self.cuda)

    def _registered(
        self,
        transport: CudaIpcTransport,
        memory: GpuBlocks,
        gpu: int,
        cuda: FakeCuda | None = None,
    ) -> CudaIpcTransport:
        cuda = cuda or FakeCuda([gpu], self._exports)
        start = int(memory.allocation.ctypes.data)
        cuda.own.append(Allocation(start, memory.allocation.nbytes, gpu))
        self._use(cuda)
        transport.register(memory)
        self._use(self.cuda)
        return transport

    def mapped(self) -> int:
        """How often the writer's blocks are open at the receiver."""
        return self.cuda.mapped.total()


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, executor: Executor) -> Iterator[Machine]:
    def use(cuda: FakeCuda) -> None:
        monkeypatch.setattr(cuda_ipc, "_driver", lambda: cuda)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    if os.environ.get("TRITON_INTERPRET") == "1":
        sums = checksum_triton._sums
        host = torch.device("cpu")
        monkeypatch.setattr(checksum_triton, "current_device", lambda _: nullcontext())
        monkeypatch.setattr(checksum_triton, "_sums", lambda pairs, _: sums(pairs, host))
    else:
        monkeypatch.setattr(checksum_triton, "copy_words", copied_by_host)
    machine = Machine(use, executor)
    yield machine
    for transport in machine.receivers:
        transport.close()
    executor.shutdown(wait=True)
    assert machine.mapped() == 0
    assert machine.cuda.misuses == []
    assert machine.cuda.is_balanced


@pytest.fixture
def transport(machine: Machine) -> CudaIpcTransport:
    """A receiver's, as ``auto`` makes it."""
    return machine.receiver()


@pytest.fixture
def link(machine: Machine, transport: CudaIpcTransport) -> CudaIpcReceiveLink:
    """From a writer on the same GPU."""
    return transport.accept(WRITER, machine.offer(READER_GPU))[0]


def test_it_is_a_transport(transport: CudaIpcTransport) -> None:
    as_one: Transport = transport
    assert as_one.name == "cuda_ipc"
    as_one.close()


def test_blocks_in_the_hosts_memory_are_refused(executor: Executor) -> None:
    memory = HostMemory(np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    with pytest.raises(ConfigError, match="on a GPU"):
        CudaIpcTransport(executor).register(memory)


def test_a_missing_gpu_is_reported(executor: Executor) -> None:
    with pytest.raises(ConfigError, match="cuda_ipc"):
        CudaIpcTransport(executor).register(GpuBlocks(1))


def test_an_offer_says_where_the_blocks_are(transport: CudaIpcTransport) -> None:
    offer = json.loads(transport.offer())
    assert len(base64.b64decode(offer["handle"])) == 64
    assert (offer["offset"], offer["blocks"], offer["block_bytes"]) == (LEAD, BLOCKS, BLOCK_BYTES)
    assert offer["device"] == gpu_uuid(READER_GPU)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boot_id": "elsewhere"}, "another host"),
        ({"pid_namespace": "pid:[1]"}, "another container"),
        ({"pid": os.getpid()}, "this process itself"),
        ({"handle": base64.b64encode(bytes(64)).decode()}, "cannot open"),
        ({"handle": "????"}, "cannot be read"),
        ({"handle": "AAAA"}, "invalid value"),
        ({"handle": 7}, "cannot be read"),
        ({"offset": -1}, "invalid value"),
        ({"blocks": 0}, "invalid value"),
        ({"blocks": 1 << 60}, "invalid value"),
        ({"blocks": BLOCKS + 1}, "cannot read the writer's blocks"),
        ({"block_bytes": None}, "cannot be read"),
    ],
)
def test_an_offer_that_is_refused(
    machine: Machine, transport: CudaIpcTransport, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(HandoffError, match=reason):
        transport.accept(WRITER, machine.offer(READER_GPU, **changes))
    assert machine.mapped() == 0


def test_an_unknown_field_of_a_newer_peer_is_ignored(
    machine: Machine, transport: CudaIpcTransport
) -> None:
    link = transport.accept(WRITER, machine.offer(READER_GPU, more=1))
    assert machine.mapped() == 1, link


@pytest.mark.parametrize("offer", [b"", b"{}", b"[]", b"3", b"\xff"])
def test_an_offer_that_is_none(transport: CudaIpcTransport, offer: bytes) -> None:
    with pytest.raises(HandoffError, match="cannot be read"):
        transport.accept(WRITER, offer)


def test_by_itself_it_opens_nothing_of_another_gpu(
    machine: Machine, transport: CudaIpcTransport
) -> None:
    with pytest.raises(HandoffError, match='transport = "cuda_ipc" forces it') as found:
        transport.accept(WRITER, machine.offer(OTHER_GPU))
    assert gpu_uuid(OTHER_GPU) in found.value.message
    assert gpu_uuid(READER_GPU) in found.value.message
    assert machine.cuda.opened == []


def test_forced_it_opens_blocks_of_a_gpu_that_the_reader_does_not_see(machine: Machine) -> None:
    link, _ = machine.receiver(between_gpus=True).accept(WRITER, machine.offer(OTHER_GPU))
    assert machine.cuda.opened == [READER_GPU]
    link.receive(batch(machine, Parts((0, 3), 64, 128)), PATIENCE_S).wait(PATIENCE_S)
    assert np.array_equal(machine.ours.rows[[0, 3], 64:192], machine.theirs.rows[[0, 3], 64:192])


def test_forced_it_refuses_a_gpu_that_cannot_be_reached(machine: Machine) -> None:
    machine.cuda.peers = False
    with pytest.raises(HandoffError, match="PEER_ACCESS_UNSUPPORTED"):
        machine.receiver(between_gpus=True).accept(WRITER, machine.offer(OTHER_GPU))


def test_a_context_that_cuda_refuses_is_an_ordinary_refusal(
    machine: Machine, transport: CudaIpcTransport
) -> None:
    offer = machine.offer(READER_GPU)
    machine.cuda.errors["cuDevicePrimaryCtxRetain"] = 201
    with pytest.raises(HandoffError, match="no context for device 0"):
        transport.accept(WRITER, offer)


def batch(
    machine: Machine, parts: Parts, target: Parts | None = None, damage: int = 0
) -> AnnouncedBatch:
    end = parts.offset + parts.length
    sums = [
        checksum(machine.theirs.rows[block, parts.offset : end].tobytes()) + damage
        for block in parts.blocks
    ]
    return AnnouncedBatch(1, parts, parts if target is None else target, tuple(sums))


@pytest.mark.parametrize(
    ("offset", "length"), [(0, BLOCK_BYTES), (64, 128), (16, 8), (4, 64), (8, 61), (3, 8)]
)
def test_a_part_of_any_alignment_arrives_and_nothing_else(
    machine: Machine, link: CudaIpcReceiveLink, offset: int, length: int
) -> None:
    expected = machine.ours.rows.copy()
    end = offset + length
    expected[[2, 0], offset:end] = machine.theirs.rows[[1, 3], offset:end]
    parts = Parts((1, 3), offset, length)
    found = batch(machine, parts, Parts((2, 0), offset, length))
    link.receive(found, PATIENCE_S).wait(PATIENCE_S)
    assert np.array_equal(machine.ours.rows, expected)


def test_a_batch_is_checked(machine: Machine, link: CudaIpcReceiveLink) -> None:
    parts = Parts((0, 3), 64, 128)
    with pytest.raises(ChecksumMismatch):
        link.receive(batch(machine, parts, damage=1), PATIENCE_S).wait(PATIENCE_S)
    with pytest.raises(CancelledError):
        link.receive(batch(machine, parts), PATIENCE_S, wanted=False).wait(PATIENCE_S)


def test_a_batch_whose_checksums_follow_has_those_of_what_was_copied(
    machine: Machine, link: CudaIpcReceiveLink
) -> None:
    parts = Parts((0, 3), 64, 128)
    transfer = link.receive(AnnouncedBatch(1, parts, parts, ()), PATIENCE_S)
    transfer.wait(PATIENCE_S)
    assert transfer.found == batch(machine, parts).checksums


@pytest.mark.parametrize(
    "parts",
    [Parts((BLOCKS,), 0, 64), Parts((-1,), 0, 64), Parts((0,), -64, 64), Parts((0,), 64, 256)],
)
def test_a_batch_that_its_writer_does_not_have(link: CudaIpcReceiveLink, parts: Parts) -> None:
    with pytest.raises(HandoffError, match="outside"):
        link.receive(AnnouncedBatch(1, parts, parts, (0,)), PATIENCE_S).wait(PATIENCE_S)


def test_a_target_of_another_length(machine: Machine, link: CudaIpcReceiveLink) -> None:
    found = batch(machine, Parts((0,), 0, 64), Parts((0,), 0, 128))
    with pytest.raises(HandoffError):
        link.receive(found, PATIENCE_S).wait(PATIENCE_S)


def test_a_target_that_this_worker_does_not_have(
    machine: Machine, link: CudaIpcReceiveLink
) -> None:
    found = batch(machine, Parts((0,), 0, 64), Parts((BLOCKS,), 0, 64))
    with pytest.raises(HandoffError, match="no 64 bytes"):
        link.receive(found, PATIENCE_S).wait(PATIENCE_S)


def test_links_that_were_closed(machine: Machine, transport: CudaIpcTransport) -> None:
    link, answer = transport.accept(WRITER, machine.offer(READER_GPU))
    sender = transport.connect(Peer("receiver", ""), answer)
    packed = sender.pack(0, Parts((0,), 0, 64))
    sender.send(1, packed, PATIENCE_S).wait(PATIENCE_S)
    link.close()
    sender.close()
    with pytest.raises(WorkerFailed, match="closed"):
        link.receive(batch(machine, Parts((0,), 0, 64)), PATIENCE_S).wait(PATIENCE_S)
    with pytest.raises(WorkerFailed, match="closed"):
        sender.send(2, packed, PATIENCE_S).wait(PATIENCE_S)


def test_a_closed_link_unmaps_the_writers_blocks_once(
    machine: Machine, transport: CudaIpcTransport, link: CudaIpcReceiveLink, executor: Executor
) -> None:
    link.close()
    link.close()
    transport.close()
    executor.shutdown(wait=True)
    link.close()
    assert machine.cuda.closed == [READER_GPU]


def test_a_transport_that_closes_unmaps_the_writers_blocks(
    machine: Machine, transport: CudaIpcTransport, link: CudaIpcReceiveLink, executor: Executor
) -> None:
    transport.close()
    executor.shutdown(wait=True)
    assert machine.mapped() == 0, link


def test_a_link_that_is_closed_after_its_executor_unmaps_at_once(
    machine: Machine, link: CudaIpcReceiveLink, executor: Executor
) -> None:
    executor.shutdown(wait=True)
    link.close()
    assert machine.mapped() == 0


def test_the_writers_blocks_stay_mapped_until_the_current_copy_has_ended(
    machine: Machine,
    link: CudaIpcReceiveLink,
    executor: Executor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copying, go = threading.Event(), threading.Event()
    copy_words = checksum_triton.copy_words

    def slow(target: int, source: int, size: int, device: torch.device) -> int:
        copying.set()
        assert go.wait(PATIENCE_S)
        assert machine.mapped() == 1
        return copy_words(target, source, size, device)

    monkeypatch.setattr(checksum_triton, "copy_words", slow)
    transfer = link.receive(batch(machine, Parts((0,), 0, 64)), PATIENCE_S)
    assert copying.wait(PATIENCE_S)
    link.close()
    # The executor's other thread closes, and has ended that before it takes this.
    executor.submit(lambda: None).result(PATIENCE_S)
    assert machine.mapped() == 1
    go.set()
    with pytest.raises(WorkerFailed, match="closed"):
        transfer.wait(PATIENCE_S)
    executor.shutdown(wait=True)
    assert machine.mapped() == 0


def test_a_writer_that_reopens_its_pair_keeps_its_blocks_mapped(
    machine: Machine, transport: CudaIpcTransport, link: CudaIpcReceiveLink
) -> None:
    again, _ = transport.accept(WRITER, machine.offer(READER_GPU))
    link.close()
    again.receive(batch(machine, Parts((0,), 0, 64)), PATIENCE_S).wait(PATIENCE_S)
    assert np.array_equal(machine.ours.rows[0, :64], machine.theirs.rows[0, :64])
    again.close()
    machine.executor.shutdown(wait=True)
    assert machine.mapped() == 0


def test_an_executor_that_has_ended(
    machine: Machine, link: CudaIpcReceiveLink, executor: Executor
) -> None:
    executor.shutdown()
    with pytest.raises(WorkerFailed, match="stopping"):
        link.receive(batch(machine, Parts((0,), 0, 64)), PATIENCE_S).wait(PATIENCE_S)
