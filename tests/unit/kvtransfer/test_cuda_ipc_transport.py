"""kvtransfer/cuda_ipc_transport.py as far as it goes without a GPU: what it offers and refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from baton.errors import ChecksumMismatch, ConfigError, HandoffError, WorkerFailed
from kvtransfer import cuda_ipc, cuda_ipc_transport
from kvtransfer.checksum import checksum
from kvtransfer.cuda_ipc_transport import CudaIpcTransport
from kvtransfer.host_memory import HostMemory
from kvtransfer.transport import Batch, Parts, Peer, Transport

PATIENCE_S = 30.0
BLOCKS, BLOCK_BYTES = 4, 256
WRITER = Peer("writer", "")
HANDLE = bytes(range(64))


class GpuBlocks(HostMemory):
    """Blocks that say they are on a GPU."""

    @property
    def device(self) -> str:
        return "cuda:1"


def blocks(seed: int) -> GpuBlocks:
    source = np.random.default_rng(seed)
    return GpuBlocks(source.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8))


@dataclass
class Opened:
    """What stands for a writer's memory that was opened."""

    exported: cuda_ipc.ExportedMemory
    size: int
    device: int


@dataclass
class Copier:
    """Copies between two memories of this process."""

    ours: GpuBlocks
    device: int
    opened: Opened
    block_bytes: int

    def copy(self, source: int, target: int, offset: int, length: int) -> int:
        data = bytearray(length)
        blocks(1).read(source, offset, memoryview(data))
        return self.ours.write(target, offset, memoryview(data))


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch, executor: Executor) -> CudaIpcTransport:
    """Of a worker that took its GPU for what it is."""

    def export(address: int, device: int) -> cuda_ipc.ExportedMemory:
        assert device == 1
        return cuda_ipc.ExportedMemory(HANDLE, 512)

    def find_device(name: str, reader: int) -> int | None:
        assert reader == 1
        return {"GPU-near": 3, "GPU-1": 1}.get(name)

    monkeypatch.setattr(cuda_ipc, "export", export)
    monkeypatch.setattr(cuda_ipc, "device_name", lambda device: f"GPU-{device}")
    monkeypatch.setattr(cuda_ipc, "find_device", find_device)
    monkeypatch.setattr(cuda_ipc, "OpenedMemory", Opened)
    monkeypatch.setattr(cuda_ipc_transport, "_Copier", Copier)
    transport = CudaIpcTransport(executor)
    transport.register(blocks(2))
    return transport


def edited(transport: Transport, **changes: Any) -> bytes:
    """Its offer as another process's."""
    offer = json.loads(transport.offer())
    return json.dumps(offer | {"pid": offer["pid"] + 1} | changes).encode()


def test_it_is_a_transport(transport: CudaIpcTransport) -> None:
    as_one: Transport = transport
    assert as_one.name == "cuda_ipc"
    as_one.close()


def test_blocks_in_the_hosts_memory_are_refused(executor: Executor) -> None:
    memory = HostMemory(np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8))
    with pytest.raises(ConfigError, match="on a GPU"):
        CudaIpcTransport(executor).register(memory)


def test_without_a_gpu_it_says_so(executor: Executor) -> None:
    with pytest.raises(ConfigError, match="cuda_ipc"):
        CudaIpcTransport(executor).register(blocks(1))


def test_an_offer_says_where_the_blocks_are(transport: CudaIpcTransport) -> None:
    offer = json.loads(transport.offer())
    assert base64.b64decode(offer["handle"]) == HANDLE
    assert (offer["offset"], offer["blocks"], offer["block_bytes"]) == (512, BLOCKS, BLOCK_BYTES)
    assert offer["device"] == "GPU-1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boot_id": "elsewhere"}, "another host"),
        ({"device": "GPU-far"}, "cannot be reached"),
        ({"handle": "????"}, "cannot be read"),
        ({"handle": "AAAA"}, "no sense"),
        ({"handle": 7}, "cannot be read"),
        ({"offset": -1}, "no sense"),
        ({"blocks": 0}, "no sense"),
        ({"block_bytes": None}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
    ],
)
def test_an_offer_that_is_refused(
    transport: CudaIpcTransport, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(HandoffError, match=reason):
        transport.accept(WRITER, edited(transport, **changes))


@pytest.mark.parametrize("offer", [b"", b"{}", b"[]", b"3", b"\xff"])
def test_an_offer_that_is_none(transport: CudaIpcTransport, offer: bytes) -> None:
    with pytest.raises(HandoffError, match="cannot be read"):
        transport.accept(WRITER, offer)


def test_a_process_does_not_open_its_own_memory(transport: CudaIpcTransport) -> None:
    with pytest.raises(HandoffError, match="this very process"):
        transport.accept(WRITER, transport.offer())


def batch(parts: Parts, target: Parts | None = None, damage: int = 0) -> Batch:
    theirs = blocks(1)
    sums = []
    for block in parts.blocks:
        data = bytearray(parts.length)
        theirs.read(block, parts.offset, memoryview(data))
        sums.append(checksum(bytes(data)) + damage)
    return Batch(1, parts, parts if target is None else target, tuple(sums))


def test_a_batch_is_copied_and_checked(transport: CudaIpcTransport) -> None:
    link, _ = transport.accept(WRITER, edited(transport, device="GPU-near"))
    parts = Parts((0, 3), 64, 128)
    link.receive(batch(parts), PATIENCE_S).wait(PATIENCE_S)
    with pytest.raises(ChecksumMismatch):
        link.receive(batch(parts, damage=1), PATIENCE_S).wait(PATIENCE_S)
    with pytest.raises(CancelledError):
        link.receive(batch(parts), PATIENCE_S, wanted=False).wait(PATIENCE_S)


@pytest.mark.parametrize(
    "parts",
    [Parts((BLOCKS,), 0, 64), Parts((-1,), 0, 64), Parts((0,), -64, 64), Parts((0,), 64, 256)],
)
def test_a_batch_that_its_writer_does_not_have(transport: CudaIpcTransport, parts: Parts) -> None:
    link, _ = transport.accept(WRITER, edited(transport))
    with pytest.raises(HandoffError, match="outside"):
        link.receive(Batch(1, parts, parts, (0,)), PATIENCE_S).wait(PATIENCE_S)


def test_a_target_of_another_length(transport: CudaIpcTransport) -> None:
    link, _ = transport.accept(WRITER, edited(transport))
    with pytest.raises(HandoffError):
        link.receive(batch(Parts((0,), 0, 64), Parts((0,), 0, 128)), PATIENCE_S).wait(PATIENCE_S)


def test_links_that_were_closed(transport: CudaIpcTransport) -> None:
    link, answer = transport.accept(WRITER, edited(transport))
    sender = transport.connect(Peer("receiver", ""), answer)
    packed = sender.pack(Parts((0,), 0, 64))
    sender.send(1, packed, PATIENCE_S).wait(PATIENCE_S)
    link.close()
    sender.close()
    with pytest.raises(WorkerFailed, match="closed"):
        link.receive(batch(Parts((0,), 0, 64)), PATIENCE_S).wait(PATIENCE_S)
    with pytest.raises(WorkerFailed, match="closed"):
        sender.send(2, packed, PATIENCE_S).wait(PATIENCE_S)


def test_an_executor_that_has_ended(transport: CudaIpcTransport, executor: Executor) -> None:
    link, _ = transport.accept(WRITER, edited(transport))
    executor.shutdown()
    with pytest.raises(WorkerFailed, match="stopping"):
        link.receive(batch(Parts((0,), 0, 64)), PATIENCE_S).wait(PATIENCE_S)
