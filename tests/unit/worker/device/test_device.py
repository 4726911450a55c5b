"""Threads and their CUDA device, on a fake of torch's calls."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
import torch

from worker.device.device import DeviceWatch, use_device, wait_for_steps

WAIT_S = 60.0
CPU, GPU = torch.device("cpu"), torch.device("cuda:3")


class FakeCuda:
    """Stands for ``torch.cuda``; ``error`` is what every call raises that waits for the device."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[str, int, object]] = queue.SimpleQueue()
        self.error: Exception | None = None

    def set_device(self, device: object) -> None:
        self.calls.put(("set_device", threading.get_ident(), device))

    def current_stream(self, device: torch.device) -> FakeCuda:
        self.calls.put(("current_stream", threading.get_ident(), device))
        return self

    def Stream(self, device: torch.device, priority: int = 0) -> str:  # noqa: N802
        return f"stream of {device} with priority {priority}"

    def Event(self, blocking: bool = False) -> FakeCuda:  # noqa: N802
        assert blocking, "a thread that waits must sleep"
        return self

    def record(self, stream: str) -> None:
        self.calls.put(("record", threading.get_ident(), stream))

    def synchronize(self) -> None:
        self.calls.put(("synchronize", threading.get_ident(), None))
        if self.error is not None:
            raise self.error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_a_threads_device(cuda: FakeCuda) -> None:
    use_device(CPU)
    assert cuda.calls.empty()
    use_device(GPU)
    use_device(torch.device("cuda"))
    here = threading.get_ident()
    assert [cuda.calls.get_nowait() for _ in range(2)] == [
        ("set_device", here, 3),
        ("set_device", here, 0),
    ]


def test_steps_are_waited_for_on_a_gpu(cuda: FakeCuda) -> None:
    wait_for_steps(CPU)
    assert cuda.calls.empty()
    wait_for_steps(GPU)
    cuda.error = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="launch failure"):
        wait_for_steps(GPU)


def test_a_lost_device_is_noticed_while_no_step_runs(cuda: FakeCuda) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = DeviceWatch(GPU, reasons.put, look_s=0.001)
    watch.start()
    called = [cuda.calls.get(timeout=WAIT_S) for _ in range(5)]
    own = called[0][1]
    assert own != threading.get_ident()
    look: list[Any] = [
        ("record", own, "stream of cuda:3 with priority -1"),
        ("synchronize", own, None),
    ]
    assert called == [("set_device", own, 3), *look, *look]
    assert reasons.empty()
    cuda.error = RuntimeError("CUDA error: an illegal memory access was encountered\nAdvice.")
    assert reasons.get(timeout=WAIT_S) == (
        "its device is lost: RuntimeError: CUDA error: an illegal memory access was encountered"
    )


def test_a_watch_that_is_stopped_looks_no_more(cuda: FakeCuda) -> None:
    watch = DeviceWatch(GPU, pytest.fail, look_s=0.001)
    watch.start()
    cuda.calls.get(timeout=WAIT_S)
    watch.stop()
    end = time.monotonic() + WAIT_S
    while watch._thread.is_alive() and time.monotonic() < end:
        time.sleep(0.001)
    assert not watch._thread.is_alive()


def test_a_cpu_is_not_watched(cuda: FakeCuda) -> None:
    threads = threading.active_count()
    watch = DeviceWatch(CPU, pytest.fail, look_s=0.001)
    watch.start()
    assert threading.active_count() == threads
    watch.stop()
