"""The Ray actor of a worker in either role: a thread with the worker's event loop.

Ray places the actor, and transports neither tokens nor tensors. The next incarnation in its slot is
another actor, which the supervisor starts.

    starting ─serves→ serving
    starting ─fails→ failed to start; the process stays, so that it can report why
    serving ─stop()→ stopping → gone
    serving ─drain(), SIGTERM, or an operator through a router→ leaving
    leaving ─nothing left, the deadline, or another SIGTERM→ gone (0), once the supervisor knows
    serving ─it fails; its loop does nothing for STUCK_S; nothing reaches it→ gone (1)
    serving ─its device is lost, its steps fail in a row (worker/process.py)→ gone (1)
    any ─SIGTERM, where there is nothing to wait for→ gone (0)

Ray's threads call the methods, and the main thread calls ``on_sigterm``. Modules that need torch
are imported only on the worker's own thread, which owns the event loop and all that runs there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from baton.config.cluster import Config
from baton.errors import BatonError
from baton.host.host_memory import limit_bytes, resident_bytes
from baton.host.oom_killer import (
    WORKER_POINTS,
    inherited_oom_score,
    oom_score,
    set_oom_score,
    worker_points,
)
from baton.host.process_end import end_process, fail
from baton.host.process_tuning import keep_buffers, spare_the_interpreter
from baton.liveness.silence import SilenceWatch
from baton.telemetry.logs import Service
from baton.telemetry.tracing import end_tracing, start_tracing
from deploy.processes.foreground import first_leaf
from deploy.processes.leadership import Fence
from deploy.processes.process_identity import Whereabouts
from deploy.workers.actor_process import (
    RayPlace,
    end_with,
    keep_native_errors,
    start_log,
    take_sigterm,
)
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import NodeShare
from deploy.workers.ranks import StartRanks, start_ranks
from deploy.workers.standby import keep_standby, take_here
from deploy.workers.start_progress import StartProgress
from deploy.workers.worker_process import BuildProcess, build_process

if TYPE_CHECKING:
    from worker.process import WorkerProcess

UNLISTED_S = 60.0
"""Time for which the registry must have omitted a worker without connections before that worker
ends, in seconds. Only time in which the registry lists other workers counts."""
_STOP_S = 10.0
_TELL_S = 2.0
"""Maximum time that a drained worker waits for a ping of the supervisor before it ends, in
seconds."""
_RESOLVER_THREADS = 2
_ANSWER_S = 0.1
"""Pause before a process ends, in seconds. In this time its answer to a ping is sent."""
LOOK_S = 1.0
STUCK_S = 60.0
"""Time without a heartbeat after which the event loop counts as stuck, in seconds. A heartbeat
without Redis takes some seconds."""
END_S = 30.0
"""Maximum time that a worker may take to end after the deadline of its drain, in seconds."""
READY_S = 2.0
"""Time after which a worker that still starts answers how far it is, in seconds."""

log = logging.getLogger(__name__)


class WorkerLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves names on separate threads.

    While a resolver hangs, each attempt to reach Redis by name takes a thread. Those threads must
    not be the ones that compile grammars and close transports.
    """

    def __init__(self) -> None:
        super().__init__()
        self._resolver = ThreadPoolExecutor(_RESOLVER_THREADS, "resolver")

    async def getaddrinfo(self, *args: Any, **options: Any) -> list[Any]:
        """Resolve a host name like ``socket.getaddrinfo``.

        The call waits for a free thread. It may be cancelled.
        """
        look_up = partial(socket.getaddrinfo, *args, **options)
        return await self.run_in_executor(self._resolver, look_up)

    def close(self) -> None:
        """Close the loop, without waiting for a thread that hangs."""
        super().close()
        self._resolver.shutdown(wait=False, cancel_futures=True)


class WorkerThread:
    """The worker's thread in an actor's process. It also ends the process."""

    def __init__(
        self,
        settings: ActorSettings,
        share: NodeShare,
        node: str,
        log_file: int,
        build: BuildProcess = build_process,
        start_ranks: StartRanks = start_ranks,
    ) -> None:
        """``node`` is Ray's id of the node; empty if Ray has not placed the worker. ``log_file`` is
        the descriptor of the log.

        ``build`` makes the worker, on the worker's thread. ``start_ranks`` starts the processes of
        its other ranks.
        """
        self._settings = settings
        self._share = share
        self._node = node
        self._build = build
        self._start_ranks = start_ranks
        self._log = log_file
        self._started: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._progress = StartProgress()
        self._stopping = False
        self._left = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: WorkerProcess | None = None
        self._drains: set[asyncio.Task[bool]] = set()
        self._leaving_known = threading.Event()
        self._terms = 0
        self._fence = Fence()
        self._leave_by: float | None = None
        """Deadline for the worker's running requests, monotonic. It is set once this process has to
        exit; before that it is None."""
        self._is_hurried = False
        """Whether a second SIGTERM has ended the time for running requests."""
        self._oom_score = inherited_oom_score() if node else oom_score()
        """The ``oom_score_adj`` of what started this process, above which the worker goes."""
        self._life = threading.Thread(target=self._live, name="worker", daemon=True)

    def begin(self) -> None:
        """Start the worker's thread and the watchdog's thread; called once."""
        set_oom_score(self._oom_score + WORKER_POINTS)
        self._life.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def wait(self) -> None:
        """Wait until the worker's thread has ended. Usually it ends the process."""
        self._life.join()

    def record(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the worker's registry record and its location, when it serves; None if it still
        starts after ``timeout_s`` seconds.

        The location is the fields of ``Whereabouts``, and those of each of ``other_ranks``.

        Raises the error that prevented its start.
        """
        concurrent.futures.wait([self._started], timeout_s)
        return self._started.result() if self._started.done() else None

    def progress(self) -> int:
        """Return how far the start is: see ``StartProgress.count``."""
        return self._progress.count()

    def ask(self, unlisted_s: float, epoch: int) -> tuple[bool, int]:
        """Return whether the worker is leaving, and the highest epoch that it has seen.

        If no process can reach the worker, end it: see ``UNLISTED_S``. ``epoch`` is that of the
        supervisor that asks.
        """
        process, highest = self._process, self._fence.see(epoch)
        if process is not None and process.leave_by is not None:
            self._leaving_known.set()
            return True, highest
        lost = unlisted_s > UNLISTED_S and highest == epoch
        if lost and self._serves() and not self._is_reached():
            fail(
                f"worker {self._settings.slot} ends: for {unlisted_s:.0f} s it was not in the "
                "registry, though others were, and it had no connections"
            )
        return False, highest

    def drain(self, deadline_s: float, epoch: int | None = None) -> None:
        """Make the worker reject new requests, and end after its last request or at the deadline.
        Returns immediately.

        ``epoch`` is that of the supervisor's order; None if this process itself decides. Raises
        StaleOrderError.
        """
        if epoch is not None:
            self._fence.check(epoch)
        loop, process = self._loop, self._process
        if loop is None or process is None or not self._serves():
            end_process(0)
        self._leave_by = time.monotonic() + deadline_s
        loop.call_soon_threadsafe(self._begin_drain, process, deadline_s)

    def _begin_drain(self, process: WorkerProcess, deadline_s: float) -> None:
        task = asyncio.get_running_loop().create_task(process.drain(deadline_s))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def on_sigterm(self, number: int, frame: object) -> None:
        """Drain the worker at the first SIGTERM. At the second one, end it soon. Runs on the main
        thread."""
        self._terms += 1
        loop, process = self._loop, self._process
        gone = self._settings.is_on_one_machine and self._settings.launcher.is_gone
        if loop is None or process is None or gone or not self._serves():
            end_process(0)
        if self._terms == 1:
            log.info("worker %s leaves (SIGTERM)", self._settings.slot)
            self.drain(self._settings.drain_s)
        else:
            self._leave_by, self._is_hurried = time.monotonic(), True
            loop.call_soon_threadsafe(process.hurry)

    @property
    def is_ready(self) -> bool:
        """Whether routers may send work to the worker."""
        return self._process is not None and self._serves() and self._process.is_ready

    def _serves(self) -> bool:
        return self._started.done() and not self._failed() and not self._stopping

    def _failed(self) -> bool:
        """Whether the worker failed to start. The process then stays, to report why."""
        return self._started.done() and self._started.exception() is not None

    def _is_reached(self) -> bool:
        """Whether any client is connected to the worker's gRPC server."""
        process = self._process
        assert process is not None, "it serves"
        assert process.record is not None, "it serves"
        try:
            open_ones = psutil.Process().net_connections(kind="tcp")
        except (psutil.Error, OSError):
            return False  # it cannot even open a file
        port = int(process.record.address.rpartition(":")[2])
        return any(
            one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in open_ones
        )

    def _watch(self) -> None:
        watch = Watchdog()
        while True:
            time.sleep(LOOK_S)
            process = self._process
            reason = watch.look(
                time.monotonic(),
                beats=process.beats if process is not None and self._serves() else None,
                ended=not self._life.is_alive() and not self._stopping and not self._failed(),
                leave_by=self._leaves_by(),
            )
            if reason is not None:
                faulthandler.dump_traceback(self._log)
                fail(f"worker {self._settings.slot} ends: {reason}")

    def _leaves_by(self) -> float | None:
        """Return the time by which the current drain must end; None if there is none. The last
        worker of its model postpones it."""
        own = None if self._process is None else self._process.leave_by
        return self._leave_by if self._is_hurried or own is None else own

    def stop(self, epoch: int | None) -> None:
        """Make the worker leave in order, and wait at most 10 seconds until it has left.

        ``epoch`` is that of the launcher's order; None if the cluster is on one machine, which has
        one launcher. Raises StaleOrderError.
        """
        if epoch is not None:
            self._fence.check(epoch)
        self._stopping = True
        if self._loop is not None and self._process is not None:
            leaving = asyncio.run_coroutine_threadsafe(self._leave(self._process), self._loop)
            leaving.result(timeout=_STOP_S)

    async def _leave(self, process: WorkerProcess) -> None:
        try:
            await process.stop()
        finally:
            await asyncio.to_thread(end_tracing)
            self._left.set()

    def _live(self) -> None:
        config = Config(**self._settings.config)
        slot = self._settings.slot
        try:
            start_tracing(config, Service.WORKER, slot, self._settings.cluster_id)
            with asyncio.Runner(loop_factory=WorkerLoop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._stopping:
                return
            reason = first_leaf(error)
            known = isinstance(reason, BatonError)
            log.log(
                logging.INFO if known else logging.ERROR,
                "worker %s has failed",
                slot,
                exc_info=not known,
            )
            if not self._started.done():
                self._started.set_exception(error)
                return
            if known:
                # This is the last line of its log, which the supervisor reports.
                fail(f"worker {self._settings.slot} ends: {reason}")
            end_process()
        if self._stopping:
            return
        if self._process is not None and self._process.drained:
            log.info("worker %s was drained", self._settings.slot)
            end_tracing()
            if self._node:
                # A supervisor that does not know of the drain would count a death.
                self._leaving_known.wait(_TELL_S)
                time.sleep(_ANSWER_S)
            end_process(0)
        log.error("worker %s ended unexpectedly", self._settings.slot)
        end_process()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        self._process = process = self._build(settings, self._share)
        lead = process.lead
        if lead is not None:
            await asyncio.to_thread(self._start_ranks, settings, lead.address, lead.fail)
        record = asdict(await process.start())
        spare_the_interpreter()
        keep_buffers()
        points = worker_points(resident_bytes(), limit_bytes())
        set_oom_score(self._oom_score + points)
        ranks = [] if lead is None else [json.loads(process) for process in lead.processes]
        own = asdict(Whereabouts.own(self._node))
        self._started.set_result({**record, **own, "other_ranks": ranks})
        async with asyncio.TaskGroup() as group:
            watch = None
            if settings.is_on_one_machine:
                watch = group.create_task(end_with(settings.launcher))
            await process.run()
            if watch is not None:
                watch.cancel()
        await process.ended()
        if self._stopping:
            # The loop must not end during the stop, which has its own deadline.
            await self._left.wait()


class Watchdog:
    """Decides whether the process must end, once every ``LOOK_S``. Owned by one thread."""

    def __init__(self) -> None:
        self._silence = SilenceWatch[str](STUCK_S)

    def look(
        self, now: float, *, beats: int | None, ended: bool, leave_by: float | None
    ) -> str | None:
        """Return why the process must end, or None.

        ``beats`` is the number of heartbeats so far, None while the worker does not serve.
        ``ended`` is true if the worker's thread ended unexpectedly. ``leave_by`` is the deadline of
        a drained worker, on the clock of ``now``: monotonic, in seconds.
        """
        if ended:
            return "its thread has ended"
        if leave_by is not None:
            return "its drain does not end" if now > leave_by + END_S else None
        if self._silence.tick({} if beats is None else {"event loop": beats}, now):
            return f"its event loop has done nothing for {STUCK_S:.0f} s"
        return None


class PingReply(StrEnum):
    """A worker's answer to a ping."""

    SERVING = "serving"
    LEAVING = "leaving"
    """The worker rejects new requests and is about to end, which does not count as a death."""


class WorkerActor:
    """The actor of rank 0; it ends its process when its worker has failed.

    No method is ``async``: Ray would then create the actor on another thread, and only the main
    thread can handle signals. Its calls would also wait for one another.
    """

    build = staticmethod(build_process)
    """Function that makes the worker from the actor's settings and from the process's share of its
    node."""

    def __init__(self, settings_json: str) -> None:
        take_here()
        settings = ActorSettings.model_validate_json(settings_json)
        place = RayPlace.own()
        share = NodeShare.take(settings, place.host, place.node, place.gcs)
        config = settings.config
        log_file = start_log(config, share.log_file, Service.WORKER, settings.slot)
        if config["log_to"] == "files":
            keep_native_errors(share.run.stderr(settings.slot))
        # Ray sets 1 for an actor without CPUs; OpenMP reads the variable when torch is loaded.
        os.environ["OMP_NUM_THREADS"] = str(share.threads)
        self._shared_hash = settings.shared_hash
        self._life = WorkerThread(settings, share, place.node, log_file, self.build)
        take_sigterm(self._life.on_sigterm)
        self._life.begin()
        if config["advanced"]["standby"]:
            keep_standby()

    def ready(self) -> dict[str, Any]:
        """Return the worker's registry record and its location, as ``WorkerThread.record`` does.
        If it still starts after ``READY_S``, return only ``progress``.

        Raises the error that prevented its start.
        """
        return self._life.record(READY_S) or {"progress": self._life.progress()}

    def shared_hash(self) -> str:
        """Return the hash of the configuration in which the worker must agree with others."""
        return self._shared_hash

    def ping(self, unlisted_s: float, epoch: int) -> tuple[str, int]:
        """Show that the process runs and Ray reaches it: returns a ``PingReply``, and the highest
        epoch that the worker has seen.

        ``unlisted_s`` is how long the registry has listed other workers and not this one. ``epoch``
        is that of the supervisor.
        """
        leaves, highest = self._life.ask(unlisted_s, epoch)
        return (PingReply.LEAVING if leaves else PingReply.SERVING).value, highest

    def drain(self, deadline_s: float, epoch: int) -> None:
        """Make the worker reject new requests, and end after its last request or at the deadline.
        Returns immediately. Raises StaleOrderError."""
        self._life.drain(deadline_s, epoch)

    def stop(self, epoch: int | None) -> None:
        """Make the worker leave in order, and wait at most 10 seconds until it has left. Raises
        StaleOrderError. See ``WorkerThread.stop``."""
        self._life.stop(epoch)
