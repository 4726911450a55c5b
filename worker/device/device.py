"""CUDA device handling on the threads of a worker; on a CPU it does nothing."""

from __future__ import annotations

import threading

import torch

from baton.host.process_end import Fail
from worker.device.device_fault import described

LOOK_S = 0.5
"""Seconds between two checks for a lost device."""


def use_device(device: torch.device) -> None:
    """Make ``device`` the calling thread's current CUDA device; does nothing on a CPU.

    Each thread that makes CUDA calls must call this first. A new thread starts with device 0, and
    its first call there takes some 0.5 GB of that GPU, which may belong to another worker.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def wait_for_steps(device: torch.device) -> None:
    """Wait for everything that was launched on the calling thread's stream, on which steps run.

    Raises CUDA's error if the device is lost. It does not wait for the whole device: that would
    break the capture of a graph on another thread.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class DeviceWatch:
    """A thread that detects a lost CUDA device while no step runs.

        new ─start→ looking ─stop→ ended
        looking ─the device is lost→ ``fail`` is called

    A fault stays hidden until the next CUDA call, and an idle worker makes none. So twice a second
    the thread records an event on its own stream, and waits for it. These two cheap calls return
    the error of any earlier call of the process. They neither wait for steps nor delay them. A
    device that does not answer blocks only this thread; ``worker.core.engine_core`` handles that.
    """

    def __init__(self, device: torch.device, fail: Fail, look_s: float = LOOK_S) -> None:
        """``fail`` ends the process. It is called on the thread of this watch when the device is
        lost. ``look_s`` is the number of seconds between two checks."""
        self._device = device
        self._fail = fail
        self._look_s = look_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)

    def start(self) -> None:
        """Start the thread that checks the device. Has no effect without a CUDA device."""
        if self._device.type == "cuda":
            self._thread.start()

    def stop(self) -> None:
        """Stop checking the device. Does not wait for the thread; idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            use_device(self._device)
            # No other stream has this priority, so this one is never part of a capture.
            stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            while not self._stopped.wait(self._look_s):
                event.record(stream)
                event.synchronize()
        except Exception as error:
            self._fail(f"its device is lost: {described(error)}")
