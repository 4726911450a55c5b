"""Runs batches: claims them, runs their lines, stores the results, ends them.

Each router process has one runner, and at most one of them owns a batch at a time. An owner's beat
increases every second. An owner whose beat has not changed for ``LEASE_S``, as another process sees
it, loses its batches. Lines without a result are run again, and later writes of the former owner
are rejected.

A batch is released if it must wait for its hours (``router.batches.schedule.plan``), or for others
whose windows end earlier: running lines end, and no new line begins.

Owned by the event loop. ``router.batches.storage.batch`` lists the states.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from baton.errors import BatonError, NotFound, StorageFull
from baton.host.background import end_tasks, spawn
from baton.liveness.silence import SilenceWatch
from baton.telemetry.logs import ErrorRow
from baton.telemetry.metrics import RouterMetrics
from router.batches.batch_planner import BatchPlanner
from router.batches.line import Line, find_faults, read_lines
from router.batches.line_runner import expired_result, failed_result
from router.batches.result_writer import ResultWriter
from router.batches.schedule.pace import Pace
from router.batches.schedule.plan import BatchSchedule, SpeedState
from router.batches.slots import BatchHeld, LineSlots
from router.batches.storage.batch import Batch, BatchStatus, Fault, LineResult
from router.batches.storage.database import Database, Free, LeaseLost, NoSpace, StatusChanged
from router.batches.storage.store import BatchStore

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Time without a change of an owner's beat after which the owner counts as dead, in seconds. A live
owner's beat changes every second.

Each process watches the beats itself. Times in the database would be wrong after the machine's
clock was set, and a monotonic clock restarts with the machine.
"""
POLL_S = 1.0
"""Interval at which a process reads the table of batches and increases its beat as an owner, in
seconds."""
SWEEP_S = 600.0
COLLECT_S = 10.0
"""Interval of deleting expired files, in seconds."""
MAX_BATCHES = 8
"""Maximum number of batches that a process runs at a time."""
MAX_OF_A_TENANT = 4
_LINES_AT_ONCE = 64
"""Number of lines that are read from a batch's file, or recorded as expired, at a time."""
_REST_S = 10.0
"""Pause before a batch that could not be run is tried again, in seconds. A batch cannot be run
while the disk is full, for example."""
_BYTES_AT_ONCE = 8 << 20
"""Number of bytes after which a piece of a batch's input file ends, with the request line that
reaches it."""
MAX_ENDING = 16
"""Maximum number of batches that are ended at a time."""
_FINAL = {
    BatchStatus.CANCELLING: BatchStatus.CANCELLED,
    BatchStatus.FINALIZING: BatchStatus.COMPLETED,
}
_KEY_IS_GONE = Fault(
    "key_revoked", "the API key that created the batch was revoked, or has expired"
)
_NO_SPACE = Fault(
    "no_space", "the tenant's storage quota has no room for the results: delete some files"
)

RunLine = Callable[[Batch, Line], Awaitable[LineResult]]


@dataclass(frozen=True, slots=True)
class _Run:
    """A batch that this process currently runs or ends."""

    task: asyncio.Task[None]
    ending: bool
    pace: Pace


class BatchRunner:
    """Runs the batches of one router process, as the docstring of this module describes."""

    def __init__(
        self,
        store: BatchStore,
        run_line: RunLine,
        model: str,
        metrics: RouterMetrics,
        *,
        planner: BatchPlanner,
        slots: LineSlots,
        has_key: Callable[[Batch], bool],
        max_in_flight: int,
        max_line_bytes: int,
        poll_s: float = POLL_S,
        lease_s: float = LEASE_S,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a runner; ``model`` is the served model's id.

        ``run_line`` runs one line, and bounds how many run at a time. A batch calls it for up to
        ``max_in_flight`` lines at once. ``has_key`` returns whether the API key that created a
        batch is still valid and allows inference.
        """
        self.owner = secrets.token_hex(8)
        self._store = store
        self._run_line = run_line
        self._model = model
        self._metrics = metrics
        self._planner = planner
        self._slots = slots
        self._schedules: Mapping[str, BatchSchedule] = {}
        self._has_key = has_key
        self._max_in_flight = max_in_flight
        self._max_line_bytes = max_line_bytes
        self._poll_s = poll_s
        self._silence = SilenceWatch[str](lease_s)
        self._unix_clock = unix_clock
        self._runs: dict[str, _Run] = {}
        self._woken = asyncio.Event()
        self._rest_until: dict[str, float] = {}
        self._follow: asyncio.Task[None] | None = None
        self._swept_at = self._collected_at = float("-inf")

    async def start(self) -> None:
        """Start looking for batches to run."""
        self._follow = spawn(self._look_again(), "batches")

    async def close(self) -> None:
        """Stop all running lines, and release the batches to other processes."""
        if self._follow is not None:
            await end_tasks([self._follow])
        await end_tasks([run.task for run in self._runs.values()])
        if self._store.used:
            with contextlib.suppress(sqlite3.Error, BatonError):
                await self._store.ask(Database.release, self.owner)

    def wake(self) -> None:
        """Read the table at once: a batch was created or cancelled in this process."""
        self._woken.set()

    # Ownership

    async def _look_again(self) -> None:
        # An error must not stop this loop: other batches would wait for a restart.
        errors = ErrorRow(log, "the look at the batches failed")
        failure = ""
        while True:
            with errors.caught():
                try:
                    if self._store.used:
                        await self._look()
                    failure = ""
                except (sqlite3.Error, OSError, BatonError) as error:
                    if str(error) != failure:
                        failure = str(error)
                        log.warning("batches cannot be read: %s", error.__cause__ or error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._woken.wait()
            self._woken.clear()

    async def _look(self) -> None:
        now = time.monotonic()
        await self._tidy(now)
        for name in [name for name, run in self._runs.items() if run.task.done()]:
            del self._runs[name]
            self._slots.resume(name)
        if self._runs:
            await self._store.ask(Database.beat, self.owner)
        beats = await self._store.ask(Database.beats)
        self._silence.tick(beats, now)
        self._rest_until = {name: until for name, until in self._rest_until.items() if now < until}
        for batch in await self._store.ask(Database.of_ids, tuple(self._runs)):
            if batch.unfinished:
                await self._attend(batch)
        self._schedules = await self._planner.look(now)
        late = sum(schedule.late_lines for schedule in self._schedules.values())
        self._metrics.batch_late_lines.set(late)
        owners = ("", self.owner, *(name for name in beats if self._silence.is_silent(name)))
        free = Free(owners, (*self._runs, *self._rest_until))
        ending = sum(run.ending for run in self._runs.values())
        if ending < MAX_ENDING:
            for batch in await self._store.ask(
                Database.to_be_ended, free, self._now(), MAX_ENDING - ending
            ):
                await self._claim(batch)
        await self._choose(owners)

    async def _choose(self, owners: Sequence[str]) -> None:
        """Claim the batches that this process should run, and release its other batches."""
        waiting = [name for name, one in self._schedules.items() if one.state is SpeedState.WAITING]
        ending = [name for name, run in self._runs.items() if run.ending]
        chosen = await self._store.ask(
            Database.to_be_run,
            Free(owners, (*waiting, *ending, *self._rest_until)),
            self._model,
            of_tenant=MAX_OF_A_TENANT,
            limit=MAX_BATCHES,
        )
        names = {batch.id for batch in chosen}
        for name, run in self._runs.items():
            if name in names:
                run.pace.change(self._lines_per_s(name))
            elif not run.ending and not run.pace.stopped:
                run.pace.stop()
                self._slots.hold(name)
        for batch in chosen:
            await self._claim(batch)

    def _lines_per_s(self, batch_id: str) -> float:
        schedule = self._schedules.get(batch_id)
        # A batch is not planned before its file is checked.
        return math.inf if schedule is None or not schedule.lines_per_s else schedule.lines_per_s

    async def _tidy(self, now: float) -> None:
        if now - self._swept_at > SWEEP_S:
            self._swept_at = now
            await self._store.sweep(now)
        if now - self._collected_at > COLLECT_S:
            self._collected_at = now
            await self._store.collect()

    async def _claim(self, batch: Batch) -> None:
        if batch.id not in self._runs:
            claimed = await self._store.ask(Database.claim, batch, self.owner)
            if claimed is not None:
                self._begin(claimed)

    def _end_of(self, batch: Batch) -> tuple[BatchStatus, tuple[Fault, ...]] | None:
        """Return the status with which a batch ends now, and the faults that it reports; None if
        the batch continues."""
        if batch.status in _FINAL:
            return _FINAL[batch.status], ()
        if self._unix_clock() >= batch.expires_at:
            return BatchStatus.EXPIRED, ()
        return None if self._has_key(batch) else (BatchStatus.FAILED, (_KEY_IS_GONE,))

    async def _attend(self, batch: Batch) -> None:
        """Stop a running batch if it was cancelled or taken over by another process, or if its API
        key was revoked."""
        run = self._runs[batch.id]
        if batch.owner != self.owner:
            if batch.owner:
                # A batch without an owner was just released.
                log.warning("batch %s was taken over by another process", batch.id)
            await end_tasks([run.task])
        elif (
            self._end_of(batch) is not None
            and batch.status is not BatchStatus.FINALIZING
            and not run.ending
        ):
            await end_tasks([run.task])
            self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        ends = self._end_of(batch) is not None
        pace = Pace(self._lines_per_s(batch.id))
        self._slots.resume(batch.id)
        work = self._end if ends else partial(self._run, pace=pace)
        task = asyncio.create_task(self._guarded(batch, work))
        # A batch that is being ended is not stopped in order to end it.
        self._runs[batch.id] = _Run(task, ends, pace)

    async def _guarded(self, batch: Batch, work: Callable[[Batch], Awaitable[None]]) -> None:
        try:
            await work(batch)
        except StatusChanged:
            # The batch was cancelled at this moment, and is claimed again.
            return
        except LeaseLost:
            log.warning("batch %s was taken over by another process", batch.id)
        except NoSpace:
            log.warning("batch %s fails: the storage quota of its tenant is used up", batch.id)
            await self._guarded(batch, self._fail_without_space)
        except StorageFull as error:
            log.warning("batch %s waits: %s", batch.id, error)
            self._rest_until[batch.id] = time.monotonic() + _REST_S
        except Exception:
            log.exception("batch %s failed unexpectedly, and is tried again", batch.id)
            self._rest_until[batch.id] = time.monotonic() + _REST_S

    # The states of a batch

    async def _run(self, batch: Batch, pace: Pace) -> None:
        async with self._input(batch) as file:
            if file is None:
                await self._fail(batch, [Fault("file_not_found", "the input file is gone")])
                return
            if batch.status is BatchStatus.VALIDATING:
                total, faults = await asyncio.to_thread(self._find_faults, batch, file)
                if faults:
                    await self._fail(batch, faults)
                    return
                batch = await self._move(
                    batch, status=BatchStatus.IN_PROGRESS, in_progress_at=self._now(), total=total
                )
            if not await self._run_lines(batch, file, pace):
                await self._move(batch, owner="")
                return
        batch = await self._move(batch, status=BatchStatus.FINALIZING, finalizing_at=self._now())
        await self._end(batch)

    async def _end(self, batch: Batch) -> None:
        """End a batch whose lines have run, that was cancelled, whose window is over, or whose API
        key was revoked."""
        ended = self._end_of(batch)
        if ended is None:
            # The key is valid again, so the batch is claimed and run again.
            return
        status, faults = ended
        if status is BatchStatus.EXPIRED:
            await self._expire_lines(batch)
        await self._store.finish(batch, status, self._now(), faults)
        log.info("batch %s is %s", batch.id, status)

    async def _fail(self, batch: Batch, faults: Sequence[Fault]) -> None:
        """End a batch with its results so far, and report ``faults``."""
        await self._store.finish(batch, BatchStatus.FAILED, self._now(), faults)

    async def _fail_without_space(self, batch: Batch) -> None:
        await self._fail(batch, (_NO_SPACE,))

    @contextlib.asynccontextmanager
    async def _input(self, batch: Batch) -> AsyncIterator[BinaryIO | None]:
        """Open the input file of a batch, until the end of the context; None if it is gone."""
        async with contextlib.AsyncExitStack() as stack:
            opened = None
            with contextlib.suppress(NotFound, FileNotFoundError):
                file = await self._store.ask(Database.file, batch.input_file_id, batch.tenant)
                opened = await stack.enter_async_context(self._store.reading(file))
            yield opened

    def _find_faults(self, batch: Batch, file: BinaryIO) -> tuple[int, list[Fault]]:
        found = find_faults(file, self._max_line_bytes, batch.endpoint, self._model)
        file.seek(0)
        return found

    async def _run_lines(self, batch: Batch, file: BinaryIO, pace: Pace) -> bool:
        """Run the request lines of a batch that have no result yet. Return False if the batch was
        put on hold before the last line began."""
        done = await self._store.ask(Database.done_lines, batch.id)
        lines = _Lines(file, self._max_line_bytes)
        places = asyncio.Semaphore(self._max_in_flight)
        writer = ResultWriter(self._store, batch, self._count)
        try:
            async with asyncio.TaskGroup() as group:
                while some := await asyncio.to_thread(lines.take):
                    for line in some:
                        if line.number in done:
                            continue
                        await places.acquire()
                        if not await pace.turn():
                            return False
                        task = group.create_task(self._run_line_of(batch, line, writer, group))
                        # Release in a callback: a task that is cancelled before it begins runs no
                        # code.
                        task.add_done_callback(lambda _: places.release())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except asyncio.CancelledError:
            # Lines that have ended count, although their batch is stopped.
            await writer.end()
            raise
        return not pace.stopped

    async def _run_line_of(
        self, batch: Batch, line: Line, writer: ResultWriter, group: asyncio.TaskGroup
    ) -> None:
        self._metrics.batch_lines_in_flight.inc()
        try:
            try:
                result = await self._run_line(batch, line)
            except BatchHeld:
                return
            except Exception as error:
                # Whatever a line raises is its own result: the other lines go on.
                log.exception("line %d of batch %s failed unexpectedly", line.number, batch.id)
                result = failed_result(line, error)
            await writer.add(result, group)
        finally:
            self._metrics.batch_lines_in_flight.dec()

    def _count(self, result: LineResult) -> None:
        self._metrics.batch_lines.labels("ok" if result.ok else "error").inc()

    async def _expire_lines(self, batch: Batch) -> None:
        if batch.status is BatchStatus.VALIDATING:
            return
        async with self._input(batch) as file:
            if file is None:
                return
            done = await self._store.ask(Database.done_lines, batch.id)
            lines = _Lines(file, self._max_line_bytes)
            while some := await asyncio.to_thread(lines.take):
                results = [expired_result(line) for line in some if line.number not in done]
                await self._store.add_results(batch, results)
                self._metrics.batch_lines.labels("expired").inc(len(results))

    async def _move(self, batch: Batch, **changes: object) -> Batch:
        return await self._store.ask(Database.move, batch, **changes)

    def _now(self) -> int:
        return int(self._unix_clock())


class _Lines:
    """Reads the lines of a batch's input file in pieces."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._lines: Iterator[Line] = read_lines(file, max_bytes)

    def take(self) -> list[Line]:
        """Return the next request lines of the file; an empty list at the end of the file."""
        taken: list[Line] = []
        began = self._file.tell()
        for line in itertools.islice(self._lines, _LINES_AT_ONCE):
            taken.append(line)
            if self._file.tell() - began >= _BYTES_AT_ONCE:
                break
        return taken
