"""The warm standby of a node: a process that has imported torch and Baton for the next worker.

    fresh ─FRESH_S later, if a standby was requested→ importing → standing by
    any ─an actor is placed in it→ taken: another process may stand by

The imports take seconds of a core: most of the time until a replaced worker serves. Ray places an
actor in one of its idle processes, if it has one. The standby holds a lock of the node. A request
for a standby is a file, which the first idle process that finds it removes.

One worker of the node requests standbys: the one that holds another lock, and the next one after it
has died. So there is a standby on each node with workers, and whatever started those workers need
not know of it.

    no standby ─at two looks in a row→ requested ─it stands by→ standby
    requested ─PATIENCE_S later still none→ requested again ─MAX_ASKS in a row→ given up
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deploy.ray_internals import prestart_worker, session_folder

FRESH_S = 2.0
"""A process that was started for somebody has him by then, and imports what he needs himself."""
_LOOK_S = 0.5
_NICENESS = 10
"""As threads that compute: whoever serves goes first."""
LOOK_S = 5.0
"""Whoever has just died is replaced first: to import beside him would make him late."""
PATIENCE_S = 60.0
MAX_ASKS = 3
PRELOAD_VARIABLE = "RAY_preload_python_modules"
PRELOAD_MODULE = "deploy.workers.ray_preload"
_ASK_S = 30.0
_KEEP_S = 24 * 3600
"""For so long Ray keeps the process, however many it has in stock; then another one is asked for.
"""

log = logging.getLogger(__name__)


class FileLock:
    """Held by one process at most, which need not end in order. Each object is one thread's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Whether it is held here from now on, or was. Raises OSError."""
        if self._descriptor is not None:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        return True

    def give_back(self) -> None:
        """Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool:
        """Whether another one holds it, now. Raises OSError."""
        if not self.take():
            return True
        self.give_back()
        return False


class StandbyPlace:
    """A node's, in a folder of its own Ray's: nodes may share a machine, and a folder."""

    def __init__(self, folder: Path, node: str) -> None:
        self._stem = folder / f"baton-standby-{node}"

    @classmethod
    def own(cls) -> StandbyPlace:
        """That of the node where this process is one of Ray's."""
        import ray  # noqa: PLC0415

        return cls(session_folder(), ray.get_runtime_context().get_node_id())

    @property
    def lock(self) -> FileLock:
        """Of whoever stands by."""
        return FileLock(self._stem.with_suffix(".lock"))

    @property
    def duty(self) -> FileLock:
        """Of the worker that sees to it that somebody does."""
        return FileLock(self._stem.with_suffix(".duty"))

    def ask(self) -> None:
        """Have the next process in stock stand by. Raises OSError."""
        self._asked.touch(mode=0o600)

    def was_asked(self) -> bool:
        """Whether somebody is to stand by; true once for each time. Raises OSError."""
        try:
            self._asked.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def _asked(self) -> Path:
        return self._stem.with_suffix(".asked")


class Standby:
    """Of this process."""

    def __init__(
        self, place: StandbyPlace, prepare: Callable[[], None], fresh_s: float = FRESH_S
    ) -> None:
        """``prepare`` imports."""
        self._place, self._prepare, self._fresh_s = place, prepare, fresh_s
        self._taken = threading.Event()
        self._thread = threading.Thread(target=self._stand_by, name="standby", daemon=True)

    def begin(self) -> None:
        """Once."""
        self._thread.start()

    def leave(self) -> None:
        """Somebody is placed in this process, who needs none of what is imported."""
        self._taken.set()

    def take(self) -> None:
        """A worker is placed in this process. Imports that are under way end first:

        two threads that import the same modules may meet them half made.
        """
        self._taken.set()
        self._thread.join()

    def _stand_by(self) -> None:
        lock = self._place.lock
        try:
            if self._taken.wait(self._fresh_s) or not self._place.was_asked():
                return
            while not lock.take():
                if self._taken.wait(_LOOK_S):
                    return
            _give_way()
            self._prepare()
            self._taken.wait()
        except Exception as error:
            # A worker that is placed here meets the same, and says so.
            log.warning("this process does not stand by: %r", error)
        finally:
            lock.give_back()


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere that would be the whole process
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)


class _Own:
    standby: Standby | None = None


def begin_here(prepare: Callable[[], None]) -> None:
    """Have this process, which Ray has just started, stand by if it is asked to."""
    _Own.standby = Standby(StandbyPlace.own(), prepare)
    _Own.standby.begin()


def take_here() -> None:
    """As ``Standby.take``, where this process has one."""
    if _Own.standby is not None:
        _Own.standby.take()


def leave_here() -> None:
    """As ``Standby.leave``, where this process has one."""
    if _Own.standby is not None:
        _Own.standby.leave()


class StandbyWatch:
    """Owned by the thread that looks."""

    def __init__(self) -> None:
        self._missing = 0
        self._asks = 0
        self._asked_at = float("-inf")

    def look(self, now: float, *, stands_by: bool) -> bool:
        """Whether to ask for one; ``now`` is monotonic, in seconds."""
        if stands_by:
            self._missing, self._asks = 0, 0
            self._asked_at = float("-inf")
            return False
        self._missing += 1
        if self._missing < 2 or self.gave_up or now - self._asked_at < PATIENCE_S:
            return False
        self._asks += 1
        self._asked_at = now
        return True

    @property
    def gave_up(self) -> bool:
        """Whether none has come, however often one was asked for."""
        return self._asks >= MAX_ASKS


def keep_standby() -> None:
    """Begin, on a thread of its own, which lasts as long as this process; once.

    Does nothing where Ray was started by others, and prepares no process.
    """
    if PRELOAD_MODULE in os.environ.get(PRELOAD_VARIABLE, "").split(","):
        threading.Thread(target=_keep, name="standby keeper", daemon=True).start()


def _keep() -> None:
    watch = StandbyWatch()
    try:
        place = StandbyPlace.own()
        duty, standby = place.duty, place.lock
        while not watch.gave_up:
            time.sleep(LOOK_S)
            if duty.take() and watch.look(time.monotonic(), stands_by=standby.is_held()):
                ask_for_standby(place)
        log.warning("no process stands by: a worker that dies here is back later")
    except Exception as error:
        # Nothing depends on it; and it goes by what Ray does not promise to keep.
        log.warning("no process can be had that stands by: %r", error)


def ask_for_standby(place: StandbyPlace) -> None:
    """Have this node's Ray take one more process into its stock, to stand by; does not wait for it.

    Raises OSError, and what Ray or gRPC raises.
    """
    place.ask()
    prestart_worker(_KEEP_S, _ASK_S)
