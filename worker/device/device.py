"""What the threads of a worker have to do with its device, where that is a CUDA device.

On a CPU nothing here does anything.
"""

from __future__ import annotations

import threading

import torch

from baton.host.process_end import Fail
from worker.device.device_fault import described

LOOK_S = 0.5
"""From one look at the device to the next."""


def use_device(device: torch.device) -> None:
    """Make a CUDA device the calling thread's current one.

    Each thread that makes CUDA calls does this first. Device 0 is current in a new thread, and the
    first call there takes some 0.5 GB of that GPU, which may be another worker's.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def wait_for_steps(device: torch.device) -> None:
    """Wait for all that was launched on the calling thread's stream, which steps run on.

    Raises what CUDA raises where the device is lost. It is not the whole device that is waited for:
    that breaks a capture of a graph under way on another thread.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class DeviceWatch:
    """A thread that notices a lost CUDA device while no step runs.

    new ─start→ looking ─stop→ ended
                looking ─the device is lost→ ``fail`` is called

    A fault stays unseen until the next CUDA call, and an idle worker makes none. The thread records
    an event on a stream of its own twice a second, and waits for that: two cheap calls, which give
    the error of any earlier call of the process. It neither waits for steps nor holds them up. A
    device that does not answer blocks this thread alone; see ``worker.core.engine_core`` for that.
    """

    def __init__(self, device: torch.device, fail: Fail, look_s: float = LOOK_S) -> None:
        """``fail`` ends the process; it is called on the thread."""
        self._device = device
        self._fail = fail
        self._look_s = look_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)

    def start(self) -> None:
        """Begin to look; without a CUDA device there is nothing to look at."""
        if self._device.type == "cuda":
            self._thread.start()

    def stop(self) -> None:
        """Look no more. Does not wait; idempotent."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            use_device(self._device)
            # Nothing else has streams of this priority: this one is never part of a capture.
            stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            while not self._stopped.wait(self._look_s):
                event.record(stream)
                event.synchronize()
        except Exception as error:
            self._fail(f"its device is lost: {described(error)}")
