"""The one Ray actor class: it houses a worker process, whichever role that plays.

States: starting → serving → (stopping → gone | drained, failed → gone); starting → failed to start.
One that has failed to start stays until somebody ends it, so that ``ready`` can say why. The next
life in its slot is another actor, which the supervisor has Ray start.

Ray places it, and carries neither a token nor a tensor. What needs torch is imported
here alone, on the worker's own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import logging
import os
import platform
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
from pydantic import BaseModel, ConfigDict

from baton.config import Config, PoolConfig

if TYPE_CHECKING:
    from worker.process import WorkerProcess

START_S = 600.0
"""A model that takes longer to load, in seconds, has failed."""
_STOP_S = 10.0
_LAUNCHER_POLL_S = 2.0

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


class WorkerActor:
    """Lives in a Ray worker process, and ends that process when its worker has failed."""

    def __init__(self, settings_json: str) -> None:
        self._settings = ActorSettings.model_validate_json(settings_json)
        log_to(self._settings.log_file, str(self._settings.config["log_level"]))
        # Ray says 1 for an actor without CPUs of its own; OpenMP reads it when torch is loaded.
        os.environ["OMP_NUM_THREADS"] = str(self._settings.threads)
        self._started: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._stopping = False
        self._left = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: WorkerProcess | None = None
        threading.Thread(target=self._live, name="worker", daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """The worker's registry record, ``pid`` and ``host``, once it serves.

        Raises what kept it from starting, or TimeoutError.
        """
        return self._started.result(timeout=START_S)

    def ping(self) -> str:
        """The slot's name: the process lives and Ray reaches it."""
        return self._settings.slot

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
        draft_model_path=settings.draft_model_path,
        number=settings.number,
        workers_here=settings.workers_here,
    )
    return WorkerProcess(worker, {"prefill": PrefillRole, "decode": DecodeRole})


def _pool(config: Config, name: str) -> PoolConfig:
    return next(pool for pool in config.pools if pool.name == name)


async def end_with(launcher: int, started: float) -> NoReturn:
    """End this process when the launcher of this process id has gone.

    The guardian ends orphans; this is for the case that it was killed as well.
    """
    # Not our child, so only asking again tells.
    while _is_alive(launcher, started):  # noqa: ASYNC110
        await asyncio.sleep(_LAUNCHER_POLL_S)
    log.error("the launcher is gone: this process ends")
    end_process()


def log_to(file: str, level: str) -> None:
    # Kept open for the life of the process: a crash inside native code is written here too.
    stream = Path(file).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
    faulthandler.enable(stream)
    logging.basicConfig(
        stream=stream,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )


def _is_alive(pid: int, started: float) -> bool:
    try:
        return psutil.Process(pid).create_time() == started
    except psutil.Error:
        return False


def end_process(code: int = 1) -> NoReturn:
    """At once, whatever its threads do."""
    # Not sys.exit: Ray would catch it, and threads inside torch would keep the process.
    logging.shutdown()
    os._exit(code)
