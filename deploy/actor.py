"""The one Ray actor class: it houses a worker process, whichever role that plays.

    starting ─serves→ serving
    starting ─fails→ failed to start (stays, so that ready() can say why)
    serving ─stop()→ stopping → gone
    serving ─drain(), SIGTERM, or an operator by way of a router→ leaving
    leaving ─nothing left, the deadline, or another SIGTERM→ gone (0), once the supervisor was told
    serving ─it fails; its loop does nothing for STUCK_S; nobody can find it→ gone (1)
    any ─SIGTERM, where there is nothing to wait for→ gone (0)

The next life in its slot is another actor, which the supervisor has Ray start.

Ray places it, and carries neither a token nor a tensor. What needs torch is imported
here alone, on the worker's own thread, which also owns the worker's event loop. Ray calls the
methods on threads of its own, and takes signals on the main thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import logging
import os
import platform
import threading
import time
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import BaseModel, ConfigDict

from baton.config import Config, PoolConfig
from deploy.actor_process import end_process, end_with, fail, is_alive, log_to, take_sigterm
from deploy.life_watch import LOOK_S, LifeWatch

if TYPE_CHECKING:
    from worker.process import WorkerProcess

START_S = 600.0
"""A model that takes longer to load, in seconds, has failed."""
UNLISTED_S = 60.0
"""A worker that the registry has not listed for this long, while it listed others, and to which
nobody is connected, is of no use."""
_STOP_S = 10.0
_TELL_S = 2.0
"""How long a worker that was drained waits for the supervisor to ask."""
_ANSWER_S = 0.1
"""For an answer to leave this process."""

log = logging.getLogger(__name__)


class ActorSettings(BaseModel):
    """What the launcher tells an actor; it travels as JSON and holds the store's password."""

    model_config = ConfigDict(frozen=True)

    config: dict[str, Any]
    pool: str
    slot: str
    model_path: str
    model_name: str
    draft_model_path: str
    redis_url: str
    cluster_id: str
    threads: int
    core_board: str
    core_lines: int
    """How many workers have a place on it."""
    number: int
    """Its place among the workers of this machine, from 0."""
    workers_here: int
    log_file: str
    launcher: int
    """Process id of the launcher."""
    launcher_started: float
    """When the launcher started, in Unix seconds."""

    def resources(self) -> dict[str, float]:
        """What the worker asks of Ray, beside a place."""
        return dict(_pool(Config(**self.config), self.pool).resources)


class Answer(StrEnum):
    """To a ping."""

    SERVING = "serving"
    LEAVING = "leaving"
    """It takes nothing more and will end: that is no death."""


class WorkerActor:
    """Lives in a Ray worker process, and ends that process when its worker has failed."""

    def __init__(self, settings_json: str) -> None:
        self._settings = ActorSettings.model_validate_json(settings_json)
        self._log = log_to(self._settings.log_file, str(self._settings.config["log_level"]))
        # Ray says 1 for an actor without CPUs of its own; OpenMP reads it when torch is loaded.
        os.environ["OMP_NUM_THREADS"] = str(self._settings.threads)
        self._started: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._stopping = False
        self._left = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: WorkerProcess | None = None
        self._drains: set[asyncio.Task[bool]] = set()
        self._leaving_told = threading.Event()
        self._terms = 0
        self._leave_by: float | None = None
        """Until when it may run what it has, once this process was told to leave; monotonic."""
        take_sigterm(self._on_sigterm)
        self._life = threading.Thread(target=self._live, name="worker", daemon=True)
        self._life.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """The worker's registry record, ``pid`` and ``host``, once it serves.

        Raises what kept it from starting, or TimeoutError.
        """
        return self._started.result(timeout=START_S)

    def ping(self, unlisted_s: float = 0.0) -> str:
        """The process lives and Ray reaches it: an ``Answer``.

        ``unlisted_s``: for how many seconds the registry has listed other workers and not this one.
        One that nobody is connected to either ends.
        """
        process = self._process
        if process is not None and process.leave_by is not None:
            self._leaving_told.set()
            return Answer.LEAVING.value
        if unlisted_s > UNLISTED_S and not self._stopping and not self._is_reached():
            fail(
                f"worker {self._settings.slot} ends: for {unlisted_s:.0f} s it was not in the"
                " registry, though others were, and nobody was connected to it"
            )
        return Answer.SERVING.value

    def drain(self, deadline_s: float) -> None:
        """Have the worker take nothing more, and end once nothing is left; does not wait."""
        loop, process = self._loop, self._process
        if loop is None or process is None or not self._serves():
            end_process(0)
        self._leave_by = time.monotonic() + deadline_s
        loop.call_soon_threadsafe(self._begin_drain, process, deadline_s)

    def _begin_drain(self, process: WorkerProcess, deadline_s: float) -> None:
        task = asyncio.get_running_loop().create_task(process.drain(deadline_s))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """Instead of Ray's, by which the process would end at once. On the main thread."""
        launcher = self._settings.launcher, self._settings.launcher_started
        self._terms += 1
        loop, process = self._loop, self._process
        if loop is None or process is None or not (self._serves() and is_alive(*launcher)):
            end_process(0)
        if self._terms == 1:
            log.info("worker %s was told to leave (SIGTERM)", self._settings.slot)
            self.drain(float(self._settings.config["drain_deadline_s"]))
        else:
            self._leave_by = time.monotonic()
            loop.call_soon_threadsafe(process.hurry)

    def _serves(self) -> bool:
        return self._started.done() and not self._failed() and not self._stopping

    def _failed(self) -> bool:
        """Whether it could not start: then the process stays, and can be asked why."""
        return self._started.done() and self._started.exception() is not None

    def _is_reached(self) -> bool:
        """Whether anybody is connected to the worker's server."""
        process = self._process
        assert process is not None, "it serves"
        assert process.record is not None, "it serves"
        try:
            open_ones = psutil.Process().net_connections(kind="tcp")
        except (psutil.Error, OSError):
            return False  # it cannot open so much as a file
        port = int(process.record.address.rpartition(":")[2])
        return any(
            one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in open_ones
        )

    def _watch(self) -> None:
        watch = LifeWatch()
        while True:
            time.sleep(LOOK_S)
            process = self._process
            reason = watch.look(
                time.monotonic(),
                beats=process.beats if process is not None and self._serves() else None,
                ended=not self._life.is_alive() and not self._stopping and not self._failed(),
                leave_by=self._leave_by or (process.leave_by if process is not None else None),
            )
            if reason is not None:
                faulthandler.dump_traceback(self._log)
                fail(f"worker {self._settings.slot} ends: {reason}")

    def stop(self) -> None:
        """Let the worker leave in order; returns when it has, within 10 seconds."""
        self._stopping = True
        if self._loop is not None and self._process is not None:
            leaving = asyncio.run_coroutine_threadsafe(self._leave(self._process), self._loop)
            leaving.result(timeout=_STOP_S)

    async def _leave(self, process: WorkerProcess) -> None:
        try:
            await process.stop()
        finally:
            self._left.set()

    def _live(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._stopping:
                return
            log.exception("worker %s has failed", self._settings.slot)
            if not self._started.done():
                self._started.set_exception(error)
                return
            end_process()
        if self._stopping:
            return
        if self._process is not None and self._process.drained:
            log.info("worker %s was drained", self._settings.slot)
            # Its end is a death to a supervisor that does not know.
            self._leaving_told.wait(_TELL_S)
            time.sleep(_ANSWER_S)
            end_process(0)
        log.error("worker %s ended unasked", self._settings.slot)
        end_process()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = _build(self._settings)
        record = await self._process.start()
        self._started.set_result({**asdict(record), "pid": os.getpid(), "host": platform.node()})
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(
                end_with(self._settings.launcher, self._settings.launcher_started)
            )
            await self._process.run()
            watch.cancel()
        await self._process.ended()
        if self._stopping:
            # The loop must not end under it; stop() itself holds the deadline.
            await self._left.wait()


def _build(settings: ActorSettings) -> WorkerProcess:
    from decode_worker.role import DecodeRole  # noqa: PLC0415
    from prefill_worker.role import PrefillRole  # noqa: PLC0415
    from worker.process import WorkerProcess  # noqa: PLC0415
    from worker.settings import WorkerSettings  # noqa: PLC0415

    config = Config(**settings.config)
    worker = WorkerSettings(
        config=config,
        pool=_pool(config, settings.pool),
        slot=settings.slot,
        model_path=settings.model_path,
        model_name=settings.model_name,
        redis_url=settings.redis_url,
        cluster_id=settings.cluster_id,
        threads=settings.threads,
        core_board=settings.core_board,
        core_lines=settings.core_lines,
        draft_model_path=settings.draft_model_path,
        number=settings.number,
        workers_here=settings.workers_here,
    )
    return WorkerProcess(worker, {"prefill": PrefillRole, "decode": DecodeRole})


def _pool(config: Config, name: str) -> PoolConfig:
    return next(pool for pool in config.pools if pool.name == name)
