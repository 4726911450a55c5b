"""The warm standby of a node: a process that has imported torch and Baton for the next worker.

    fresh ─FRESH_S later, if a standby was requested→ importing → standby
    any ─an actor is placed in it→ taken: another process may become the standby

The imports take seconds of a core, which is most of the time until a replaced worker serves. Ray
places an actor in one of its idle processes, if it has one. The standby holds a lock of the node. A
request for a standby is a file, which the first idle process that finds it removes.

One worker of the node requests standbys: the one that holds another lock. After its death, another
worker takes the lock. So each node with workers has a standby, independent of what started the
workers.

    no standby ─at two looks in a row→ requested ─a process is ready→ standby
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
"""Minimum age of an idle process that becomes a standby, in seconds. Ray may already have assigned
an actor to a younger process."""
_LOOK_S = 0.5
_NICENESS = 10
"""The niceness of the thread that imports modules, so that serving processes have precedence."""
LOOK_S = 5.0
"""Interval between two checks whether the node has a standby, in seconds. It is long, so that a
dead worker is replaced before a new standby starts to import: imports would delay the
replacement."""
PATIENCE_S = 20.0
"""Time after which a request for a standby is repeated, in seconds. The process that was started
for the request may have become a worker instead. If it is only slow to start, each repetition adds
one idle process."""
MAX_ASKS = 6
PRELOAD_VARIABLE = "RAY_preload_python_modules"
PRELOAD_MODULE = "deploy.workers.ray_preload"
_ASK_S = 30.0
_KEEP_S = 24 * 3600
"""Time for which Ray keeps the standby's process, in seconds, even with many idle processes. Then
another standby is requested."""

log = logging.getLogger(__name__)


class FileLock:
    """A lock that one process holds until it ends. Each object is for one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Take the lock, and return whether this object holds it. Raises OSError."""
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
        """Release the lock; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def is_held(self) -> bool:
        """Whether the lock is held now, by another process or by another object. Raises OSError."""
        if not self.take():
            return True
        self.give_back()
        return False


class StandbyFiles:
    """Lock and request files of a node's warm standby. They are in Ray's folder, which several
    nodes of one machine may share; their names have the node's id."""

    def __init__(self, folder: Path, node: str) -> None:
        self._stem = folder / f"baton-standby-{node}"

    @classmethod
    def own(cls) -> StandbyFiles:
        """Return the standby files of this process's Ray node."""
        import ray  # noqa: PLC0415

        return cls(session_folder(), ray.get_runtime_context().get_node_id())

    @property
    def lock(self) -> FileLock:
        """Return the lock that the standby process holds."""
        return FileLock(self._stem.with_suffix(".lock"))

    @property
    def duty(self) -> FileLock:
        """Return the lock of the worker that requests standbys on this node."""
        return FileLock(self._stem.with_suffix(".duty"))

    def request(self) -> None:
        """Request that the next idle process becomes the standby. Raises OSError."""
        self._asked.touch(mode=0o600)

    def take_request(self) -> bool:
        """Return whether a standby is requested, and remove the request. Raises OSError."""
        try:
            self._asked.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def _asked(self) -> Path:
        return self._stem.with_suffix(".asked")


class Standby:
    """Makes this process a warm standby, if one is requested."""

    def __init__(
        self, place: StandbyFiles, prepare: Callable[[], None], fresh_s: float = FRESH_S
    ) -> None:
        """``prepare`` imports the modules that a worker needs."""
        self._place, self._prepare, self._fresh_s = place, prepare, fresh_s
        self._taken = threading.Event()
        self._thread = threading.Thread(target=self._stand_by, name="standby", daemon=True)

    def begin(self) -> None:
        """Start the thread that waits for a request and then imports; called once."""
        self._thread.start()

    def leave(self) -> None:
        """Stop becoming a standby, because Ray has placed in this process an actor that does not
        need the imports."""
        self._taken.set()

    def take(self) -> None:
        """Wait until a running import has ended, because Ray has placed a worker in this process.

        Two threads that import the same modules at once may see incomplete ones.
        """
        self._taken.set()
        self._thread.join()

    def _stand_by(self) -> None:
        lock = self._place.lock
        try:
            if self._taken.wait(self._fresh_s) or not self._place.take_request():
                return
            while not lock.take():
                if self._taken.wait(_LOOK_S):
                    return
            _give_way()
            self._prepare()
            self._taken.wait()
        except Exception as error:
            # A worker that is placed here fails in the same way, and reports it.
            log.warning("this process cannot be a standby: %r", error)
        finally:
            lock.give_back()


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere the call would change the whole process
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)


class _Own:
    standby: Standby | None = None


def begin_here(prepare: Callable[[], None]) -> None:
    """Make this process, which Ray has just started, a warm standby if one is requested."""
    _Own.standby = Standby(StandbyFiles.own(), prepare)
    _Own.standby.begin()


def take_here() -> None:
    """If this process is becoming a standby, wait until its imports have ended. Called when a
    worker is placed in it."""
    if _Own.standby is not None:
        _Own.standby.take()


def leave_here() -> None:
    """If this process is becoming a standby, stop that. Called when an actor other than a worker is
    placed in it."""
    if _Own.standby is not None:
        _Own.standby.leave()


class StandbyWatch:
    """Decides when to request a standby. Pure; owned by one thread."""

    def __init__(self) -> None:
        self._missing = 0
        self._asks = 0
        self._asked_at = float("-inf")

    def look(self, now: float, *, stands_by: bool) -> bool:
        """Return whether to request a standby now.

        ``stands_by`` is true if the node has a standby. ``now`` is monotonic, in seconds.
        """
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
        """Whether this watch has stopped requesting standbys, because the last ``MAX_ASKS``
        requests produced none."""
        return self._asks >= MAX_ASKS


def keep_standby() -> None:
    """Request standbys on a thread, until this process ends; called once.

    Does nothing on a Ray cluster that was started without the preload module.
    """
    if PRELOAD_MODULE in os.environ.get(PRELOAD_VARIABLE, "").split(","):
        threading.Thread(target=_keep, name="standby keeper", daemon=True).start()


def _keep() -> None:
    watch = StandbyWatch()
    try:
        place = StandbyFiles.own()
        duty, standby = place.duty, place.lock
        while not watch.gave_up:
            time.sleep(LOOK_S)
            if duty.take() and watch.look(time.monotonic(), stands_by=standby.is_held()):
                request_standby(place)
        log.warning("no warm standby can be started: a worker that dies here is back later")
    except Exception as error:
        # Nothing depends on a standby, and this uses private names of Ray.
        log.warning("cannot start a warm standby: %r", error)


def request_standby(place: StandbyFiles) -> None:
    """Make this node's Ray start one more idle process, as a standby; does not wait for it.

    Raises OSError, and what Ray or gRPC raises.
    """
    place.request()
    prestart_worker(_KEEP_S, _ASK_S)
