"""kvtransfer/transports/cuda_ipc.py with a driver that records what is opened and closed, and
where."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Iterator

import numpy as np
import pytest

from baton.errors import ConfigError, HandoffError, WorkerFailed
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.cuda_ipc import ExportedMemory, OpenedMemory, device_uuid, export
from tests.support.kvtransfer.fake_cuda import Allocation, FakeCuda, gpu_uuid

DATA = np.arange(4096, dtype=np.uint8)
BASE = int(DATA.ctypes.data)
HANDLE = bytes(range(64))
WRITER_GPU, READER_GPU, READER = 3, 5, 1
EXPORTED = ExportedMemory(HANDLE, 512)
SIZE = DATA.size - EXPORTED.offset


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A reader's driver. It sees two GPUs, and not the writer's."""
    cuda = FakeCuda([4, READER_GPU], {HANDLE: Allocation(BASE, DATA.size, WRITER_GPU)})
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: cuda)
    yield cuda
    assert cuda.misuses == []
    assert cuda.is_balanced


def test_memory_of_a_hidden_gpu_is_opened_and_closed_for_the_reader(cuda: FakeCuda) -> None:
    opened = OpenedMemory(EXPORTED, SIZE, READER)
    with opened.reading() as address:
        assert ctypes.string_at(address, SIZE) == DATA[EXPORTED.offset :].tobytes()
    opened.close()
    assert (cuda.opened, cuda.closed) == ([READER_GPU], [READER_GPU])


def test_memory_that_is_closed_is_unmapped_once(cuda: FakeCuda) -> None:
    opened = OpenedMemory(EXPORTED, SIZE, READER)
    opened.close()
    assert cuda.closed == [READER_GPU]
    opened.close()
    del opened
    gc.collect()
    assert cuda.closed == [READER_GPU]


def test_memory_that_is_read_is_unmapped_by_its_last_reader(cuda: FakeCuda) -> None:
    opened = OpenedMemory(EXPORTED, SIZE, READER)
    with opened.reading():
        with opened.reading():
            opened.close()
            opened.close()
        assert cuda.closed == []
        with pytest.raises(WorkerFailed, match="closed"), opened.reading():
            pass
        assert cuda.closed == []
    assert cuda.closed == [READER_GPU]


def test_a_reader_that_fails_counts_no_longer(cuda: FakeCuda) -> None:
    opened = OpenedMemory(EXPORTED, SIZE, READER)
    with pytest.raises(ZeroDivisionError), opened.reading():
        raise ZeroDivisionError
    opened.close()
    assert cuda.closed == [READER_GPU]


def test_what_is_opened_twice_stays_mapped_until_both_are_closed(cuda: FakeCuda) -> None:
    first, second = (OpenedMemory(EXPORTED, SIZE, READER) for _ in range(2))
    first.close()
    first.close()
    assert cuda.mapped[READER_GPU, BASE] == 1
    second.close()
    assert cuda.mapped[READER_GPU, BASE] == 0


def test_memory_that_was_forgotten_is_unmapped_with_its_object(cuda: FakeCuda) -> None:
    opened = OpenedMemory(EXPORTED, SIZE, READER)
    assert cuda.mapped[READER_GPU, BASE] == 1
    del opened
    gc.collect()
    assert cuda.mapped[READER_GPU, BASE] == 0


def test_a_gpu_that_cannot_be_reached_is_an_ordinary_refusal(cuda: FakeCuda) -> None:
    cuda.peers = False
    with pytest.raises(HandoffError, match=r"cannot open .*PEER_ACCESS_UNSUPPORTED \(217\)"):
        OpenedMemory(EXPORTED, SIZE, READER)
    assert cuda.mapped.total() == 0


def test_a_handle_that_cuda_does_not_know(cuda: FakeCuda) -> None:
    with pytest.raises(HandoffError, match="cannot open"):
        OpenedMemory(ExportedMemory(bytes(64), 0), SIZE, READER)


def test_memory_that_kernels_cannot_access_is_closed_again(cuda: FakeCuda) -> None:
    cuda.errors["cuPointerGetAttribute"] = 1
    with pytest.raises(HandoffError, match=r"this GPU cannot read .*INVALID_VALUE"):
        OpenedMemory(EXPORTED, SIZE, READER)
    assert (cuda.opened, cuda.closed) == ([READER_GPU], [READER_GPU])


def test_a_writer_that_promises_more_than_its_allocation(cuda: FakeCuda) -> None:
    with pytest.raises(HandoffError, match="this GPU cannot read"):
        OpenedMemory(EXPORTED, SIZE + 1, READER)
    assert cuda.mapped.total() == 0


def test_a_close_that_fails_is_logged(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.errors["cuIpcCloseMemHandle"] = 201
    with caplog.at_level(logging.WARNING, cuda_ipc.__name__):
        OpenedMemory(EXPORTED, SIZE, READER).close()
    assert "did not close a writer's blocks: CUDA_ERROR_INVALID_CONTEXT (201)" in caplog.text


def test_an_error_that_cuda_has_no_name_for(cuda: FakeCuda) -> None:
    cuda.errors["cuIpcOpenMemHandle_v2"] = 777
    with pytest.raises(HandoffError, match=r"an unknown error \(777\)"):
        OpenedMemory(EXPORTED, SIZE, READER)


def test_what_is_exported_says_where_in_its_allocation_it_begins(cuda: FakeCuda) -> None:
    cuda.own.append(Allocation(BASE, DATA.size, READER_GPU))
    exported = export(BASE + 1024, READER)
    assert exported.offset == 1024
    assert cuda.machine[exported.handle].base == BASE


def test_memory_that_cannot_be_exported_names_the_setting_in_both_its_names(
    cuda: FakeCuda,
) -> None:
    cuda.own.append(Allocation(BASE, DATA.size, READER_GPU))
    cuda.errors["cuIpcGetMemHandle"] = 1
    with pytest.raises(ConfigError, match="INVALID_VALUE") as found:
        export(BASE, READER)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments"):
        assert name in found.value.message


def test_gpus_have_the_machines_names(cuda: FakeCuda) -> None:
    assert device_uuid(READER) == gpu_uuid(READER_GPU)
    with pytest.raises(ConfigError, match="CUDA has no device 2"):
        device_uuid(2)
    cuda.errors["cuDeviceGetUuid_v2"] = 1
    with pytest.raises(ConfigError, match="no UUID for device 0"):
        device_uuid(0)


@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"])
def test_a_context_that_cuda_refuses(cuda: FakeCuda, function: str) -> None:
    cuda.errors[function] = 201
    with pytest.raises(ConfigError, match=r"context (of|for) device 1: CUDA_ERROR_INVALID_CONTEXT"):
        OpenedMemory(EXPORTED, SIZE, READER)


def test_bytes_are_copied_wherever_they_begin(cuda: FakeCuda) -> None:
    opened = OpenedMemory(EXPORTED, SIZE, READER)
    target = np.zeros(61, dtype=np.uint8)
    with opened.reading() as address:
        cuda_ipc.copy_bytes(int(target.ctypes.data), address + 5, 61, READER, 0)
        assert np.array_equal(target, DATA[EXPORTED.offset + 5 :][:61])
        cuda.errors["cuMemcpyDtoDAsync_v2"] = 1
        with pytest.raises(HandoffError, match=r"cannot copy .*INVALID_VALUE"):
            cuda_ipc.copy_bytes(int(target.ctypes.data), address, 61, READER, 0)
    opened.close()
