"""worker/device/gpu_memory.py: with the host in the GPU's place, and on a GPU where there is
one."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch

from baton.errors import HandoffError
from kvtransfer.memory import copying
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import BlockMemory
from worker.device import gpu_memory
from worker.device.gpu_memory import GpuMemory

BLOCKS, BLOCK_BYTES = 5, 192
PARTS = [(0, 0, BLOCK_BYTES), (4, 0, BLOCK_BYTES), (2, 64, 128), (3, 5, 61), (1, 4, 12)]


class FakeStream:
    """Everything has been done when it is asked for; it counts how often that was."""

    synchronized = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        FakeStream.synchronized += 1


def _fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def checksum_of(part: torch.Tensor) -> int:
        # As the kernel, which is tested elsewhere, it takes whole words only.
        assert part.numel() % 8 == 0
        assert part.storage_offset() % 4 == 0
        return checksum(part.numpy().data)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(gpu_memory, "checksum_tensor", checksum_of)
    monkeypatch.setattr(gpu_memory, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(FakeStream, "synchronized", 0)


@pytest.fixture(params=["host", "gpu"])
def data(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    blocks = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    if request.param == "host":
        _fake_gpu(monkeypatch)
        return blocks
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return blocks.cuda()


@pytest.fixture
def memory(data: torch.Tensor) -> BlockMemory:
    return GpuMemory(data)


def test_what_it_says_of_itself(data: torch.Tensor, memory: BlockMemory) -> None:
    assert (memory.blocks, memory.block_bytes) == (BLOCKS, BLOCK_BYTES)
    assert memory.device == str(data.device)
    assert memory.shared_file is None


@pytest.mark.parametrize(("block", "offset", "length"), PARTS)
def test_parts_are_read(
    data: torch.Tensor, memory: BlockMemory, block: int, offset: int, length: int
) -> None:
    expected = data[block, offset : offset + length].cpu().numpy().tobytes()
    out = bytearray(length)
    assert memory.checksum(block, offset, length) == checksum(expected)
    assert memory.read(block, offset, memoryview(out)) == checksum(expected)
    assert out == expected


@pytest.mark.parametrize(("block", "offset", "length"), PARTS)
def test_parts_are_written_and_nothing_else(
    data: torch.Tensor, memory: BlockMemory, block: int, offset: int, length: int
) -> None:
    fresh = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8)
    expected = data.cpu().clone()
    expected[block, offset : offset + length] = torch.from_numpy(fresh)
    assert memory.write(block, offset, fresh.data) == checksum(fresh.data)
    assert torch.equal(data.cpu(), expected)


@pytest.mark.parametrize(("block", "offset", "length"), PARTS)
def test_a_context_reads_and_writes_a_part(
    data: torch.Tensor, memory: BlockMemory, block: int, offset: int, length: int
) -> None:
    before = data.cpu().clone()
    with memory.reading(block, offset, length) as part:
        assert bytes(part) == before[block, offset : offset + length].numpy().tobytes()
    with memory.writing(block, offset, length) as part:
        part[:] = bytes(length)
    before[block, offset : offset + length] = 0
    assert torch.equal(data.cpu(), before)


def test_a_context_that_fails_leaves_a_gpu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpu(monkeypatch)
    data = torch.ones(BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    memory = GpuMemory(data)
    with suppress(ZeroDivisionError), memory.writing(1, 0, 64) as part:
        part[:] = bytes(64)
        raise ZeroDivisionError
    assert bool((data == 1).all())
    memory.write(1, 0, memoryview(bytes(64)))
    assert not data[1, :64].any(), "its lock is free"


def test_a_copy_has_arrived_when_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_gpu(monkeypatch)
    memory = GpuMemory(torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8))
    memory.write(0, 0, memoryview(bytes(64)))
    assert FakeStream.synchronized == 1
    read_when = []

    def copy(to: memoryview, source: object, *, soon_read: bool) -> int:
        read_when.append(FakeStream.synchronized)
        return 0

    monkeypatch.setattr(copying, "copy", copy)
    memory.read(0, 0, memoryview(bytearray(64)))
    assert read_when == [2]


def test_threads_share_the_staging(data: torch.Tensor, memory: BlockMemory) -> None:
    wrong: list[int] = []

    def work(block: int) -> None:
        mine = bytes([block + 1]) * BLOCK_BYTES
        out = bytearray(BLOCK_BYTES)
        for _ in range(50):
            memory.write(block, 0, memoryview(mine))
            memory.read(block, 0, memoryview(out))
            if out != mine:
                wrong.append(block)

    threads = [threading.Thread(target=work, args=(block,)) for block in range(BLOCKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert data[:, 0].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("block", "offset", "length"), [(-1, 0, 64), (BLOCKS, 0, 64), (0, 0, 193), (4, 160, 64)]
)
def test_parts_that_there_are_not_are_refused(
    data: torch.Tensor, memory: BlockMemory, block: int, offset: int, length: int
) -> None:
    before = data.clone()
    with pytest.raises(HandoffError, match="5 blocks of 192 bytes"):
        memory.read(block, offset, memoryview(bytearray(length)))
    with pytest.raises(HandoffError):
        memory.write(block, offset, memoryview(bytes(length)))
    with pytest.raises(HandoffError):
        memory.checksum(block, offset, length)
    assert torch.equal(data, before)


def test_other_data_is_refused() -> None:
    for data in (
        torch.zeros(4, 64, dtype=torch.int8),
        torch.zeros(256, dtype=torch.uint8),
        torch.zeros(4, 128, dtype=torch.uint8)[:, ::2],
    ):
        with pytest.raises(ValueError, match="contiguous uint8"):
            GpuMemory(data)
