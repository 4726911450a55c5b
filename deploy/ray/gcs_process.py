"""Ray's control store (GCS) as a process that is restarted after its death, and killed when it
hangs.

    running (started by Ray) ─dies→ dead ─start()→ running (a child of the launcher)
    answering ─no answer for SILENT_S→ silent, and killed ─its next process→ answering

Only a GCS with a store is restarted: the next process reads the last one's state there.

If the wall clock is set back while the store is unreachable, a GCS can hang for as long, because it
waits for the store by that clock. Until it is killed, no dead worker is detected or replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

import psutil

from baton.liveness.silence import SilenceWatch
from deploy import ray_internals
from deploy.processes.child import Child
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.run_directory import ClusterMark, RunDirectory

_POLL_S = 0.2
_STOP_S = 3.0
SILENT_S = 15.0
"""Time without an answer after which the control store is killed, in seconds. A control store that
starts and reads its state takes less time."""
_ASK_S = 2.0
_EACH_S = 1.0
_KEY = b"baton"

log = logging.getLogger(__name__)


class GcsProcess:
    """The process of Ray's control store (GCS), as a ``deploy.launcher.part_watch.Part``."""

    def __init__(
        self,
        first: psutil.Process,
        command: Sequence[str],
        mark: ClusterMark,
        run: RunDirectory,
    ) -> None:
        """``first`` is the process of the control store that Ray has started. ``command`` starts
        another one on the same port."""
        self._first = first
        self._command = tuple(command)
        self._mark = mark
        self._run = run
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        return self._first.pid if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start a new process of the control store after the last one has ended. Raises OSError."""
        self._child = await Child.spawn("gcs", self._command, self._mark, self._run.log("gcs"))

    async def wait(self) -> str:
        """Wait for the death of the control store's process. Returns how it ended."""
        if self._child is not None:
            return await self._child.wait()
        # The process is Ray's child, not this process's, so it is polled.
        while runs(self._first):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return "it died"

    def kill(self) -> None:
        """Send SIGKILL to the control store's process, if it runs."""
        if self._child is not None:
            self._child.kill()
            return
        with contextlib.suppress(psutil.Error):
            self._first.kill()

    async def stop(self) -> None:
        """End the control store's process if the launcher has started it. If Ray has started it, do
        nothing: Ray ends it."""
        if self._child is not None:
            await self._child.end(_STOP_S)


def runs(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class GcsProbe:
    """Queries the control store through this driver. Owned by one event loop."""

    def __init__(self) -> None:
        self._thread = DaemonThread("gcs questions")

    async def ask(self, timeout_s: float) -> None:
        """Make the control store read a key from its own store. Raises what Ray raises on failure.

        Raises TimeoutError if Ray has not returned after twice ``timeout_s``.
        """
        try:
            async with asyncio.timeout(2 * timeout_s):
                # The control store reads a key from its own store each time, even a missing one.
                await self._thread.call(lambda: ray_internals.read_gcs_key(_KEY, timeout_s))
        except TimeoutError:
            # The next query must not wait for this one.
            self._thread = DaemonThread("gcs questions")
            raise


class GcsWatch:
    """Kills a silent control store. Owned by the launcher's event loop; never blocks."""

    def __init__(
        self,
        gcs: GcsProcess,
        ask: Callable[[float], Coroutine[Any, Any, None]],
        report: Callable[[str], None],
        max_s: float = SILENT_S,
    ) -> None:
        """``ask(timeout_s)`` returns when the control store has read from its store. Otherwise it
        raises an error after about ``timeout_s`` seconds.

        ``report`` prints one line of text.
        """
        self._gcs = gcs
        self._ask = ask
        self._report = report
        self._max_s = max_s
        self._silence = SilenceWatch[int](max_s)
        self._answers = 0

    async def run(self) -> NoReturn:
        """Query the control store regularly, and kill it when it is silent, until cancelled."""
        while True:
            await self._ask_it()
            # The next process gets the same time to start.
            if self._silence.tick({self._gcs.pid: self._answers}, time.monotonic()):
                self._report(f"gcs has not answered for {self._max_s:.0f} s; killing it")
                self._gcs.kill()
            await asyncio.sleep(_EACH_S)

    async def _ask_it(self) -> None:
        try:
            await self._ask(_ASK_S)
        except Exception as error:
            log.debug("gcs: %s", error)
        else:
            self._answers += 1


class RemoteGcsWatch:
    """Reports when a control store that Baton did not start is silent, and when it is back."""

    def __init__(
        self,
        ask: Callable[[float], Coroutine[Any, Any, None]],
        report: Callable[[str], None],
        max_s: float = SILENT_S,
    ) -> None:
        """Take the same arguments as ``GcsWatch``, except ``gcs``."""
        self._ask = ask
        self._report = report
        self._max_s = max_s

    async def run(self) -> NoReturn:
        """Query the control store regularly, and report when it is silent or back, until
        cancelled."""
        silence, answers, reported = SilenceWatch[str](self._max_s), 0, False
        while True:
            try:
                await self._ask(_ASK_S)
            except Exception as error:
                log.debug("Ray's control store: %s", error)
            else:
                answers += 1
            silence.tick({"gcs": answers}, time.monotonic())
            silent = silence.is_silent("gcs")
            if silent != reported:
                reported = silent
                self._report(
                    "Ray's control store does not answer: workers keep serving, and dead ones are "
                    "not replaced"
                    if silent
                    else "Ray's control store is back"
                )
            await asyncio.sleep(_EACH_S)
