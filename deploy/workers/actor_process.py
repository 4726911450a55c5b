"""The Ray worker process of an actor: its node, its log, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from baton.errors import BatonError
from baton.host.process_end import end_process
from baton.telemetry.log_file import log_to_file
from baton.telemetry.logs import Service, log_to_stream
from deploy.processes.process_identity import ProcessIdentity
from deploy.workers.actor_end import ActorEnd, EndKind, last_line, monitored_end, process_end
from deploy.workers.node import NodeWorkers

_LAUNCHER_POLL_S = 2.0
_BOUND_S = 60.0
_NATIVE_BYTES = 1 << 20

log = logging.getLogger(__name__)


async def end_with(launcher: ProcessIdentity) -> NoReturn:
    """Wait until the launcher of a cluster on one machine is gone, then end this process.

    The guardian ends orphans. This covers the case that the guardian was killed, too.
    """
    # The launcher is not a child of this process, so it is polled.
    while not launcher.is_gone:  # noqa: ASYNC110
        await asyncio.sleep(_LAUNCHER_POLL_S)
    log.error("the launcher is gone: this process exits")
    end_process()


def end_other(process: ProcessIdentity) -> None:
    """Send SIGKILL to a process, if it runs on this machine. Never raises."""
    with contextlib.suppress(OSError):
        process.send(signal.SIGKILL)


def end_others(workers: Path, slot: str) -> None:
    """Send SIGKILL to all other processes of a node that have the same slot.

    ``workers`` is the folder of the node's ``NodeWorkers``, in which ``slot`` names a process.
    """
    for other in NodeWorkers(workers).running():
        if other.slot == slot and other.process.pid != os.getpid():
            end_other(other.process)


def take_sigterm(handler: Callable[[int, object], None]) -> None:
    """Replace Ray's handler of SIGTERM, which ends a worker process at once.

    Ray creates an actor on the main thread, and runs signal handlers there between its own calls,
    about every 10 ms. An actor whose class has an ``async`` method is created on another thread:
    then this does nothing, as in a process that uses the class without Ray.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def start_log(config: Mapping[str, Any], file: Path, service: Service, instance: str) -> int:
    """Write this process's log, and crashes inside native code, to ``file`` or to standard output,
    as ``log_to`` in ``config`` says. Returns the descriptor, which stays open until the process
    ends.

    ``service`` and ``instance`` name the process: see ``baton.telemetry.logs.formatter``.
    """
    named = str(config["log_level"]), str(config["log_format"]), service, instance
    if config["log_to"] == "stdout":
        # Ray's own stream has no buffer, so a line may be written in parts.
        descriptor = sys.stdout.fileno()
        stream = open(descriptor, "a", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
        log_to_stream(stream, *named)
    else:
        descriptor = log_to_file(file, *named).fileno()
    faulthandler.enable(descriptor)
    return descriptor


def keep_native_errors(file: Path) -> None:
    """Let native code of this process write its standard error to ``file``, which is emptied first.

    Ray reads standard error from a pipe within the process, so that the last words of one that
    crashes may stay in it. Python's own stream keeps the pipe: on a full disk, a write to a file
    raises, and Ray prints. Nothing is changed if the file cannot be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    try:
        fresh = os.open(file, flags, 0o644)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)
        return
    sys.stderr = open(  # noqa: SIM115
        os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1
    )
    os.dup2(fresh, 2)
    threading.Thread(target=_bound, args=(fresh,), name="native errors", daemon=True).start()


def _bound(file: int) -> None:
    """Empty the file whenever it has become large: libraries may write a line now and then."""
    while True:
        time.sleep(_BOUND_S)
        if os.fstat(file).st_size > _NATIVE_BYTES:
            os.ftruncate(file, 0)


@dataclass(frozen=True, slots=True)
class RayPlace:
    """The Ray node of a process."""

    host: str
    """The node's address. It is the loopback address if all of the cluster is on one machine."""
    node: str
    """Ray's id of the node."""
    gcs: str
    """Address of Ray's control store, host:port."""

    @classmethod
    def own(cls) -> RayPlace:
        """Return the Ray node of this process, which must be a worker process of Ray or a
        driver."""
        import ray  # noqa: PLC0415

        context = ray.get_runtime_context()
        return cls(
            host=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            node=context.get_node_id(),
            gcs=str(context.gcs_address),
        )


def is_failure(error: Exception) -> bool:
    """Whether the error of a call says that the actor has failed or died. Otherwise Ray itself has
    failed, and the actor may run on."""
    from ray import exceptions  # noqa: PLC0415

    failures = (
        exceptions.RayTaskError,  # raised by the actor itself
        exceptions.ActorUnschedulableError,
        exceptions.ActorPlacementGroupRemoved,
        exceptions.RuntimeEnvSetupError,
    )
    return is_death(error) or isinstance(error, failures)


def is_death(error: BaseException | None) -> bool:
    """Whether the error of a call says that the actor's process has ended."""
    from ray import exceptions  # noqa: PLC0415

    # Ray's memory monitor has ended the actor of an OutOfMemoryError.
    return isinstance(error, (exceptions.ActorDiedError, exceptions.OutOfMemoryError))


def actor_end(error: BaseException) -> ActorEnd:
    """Return what the error of a call says about the actor's end."""
    from ray.exceptions import OutOfMemoryError  # noqa: PLC0415

    if isinstance(error, OutOfMemoryError):
        return monitored_end(str(error))
    if is_death(error):
        return process_end(str(error))
    if isinstance(error, BatonError):
        return ActorEnd(EndKind.REPORTED, error.message)
    return ActorEnd(EndKind.REPORTED, f"{type(error).__name__}: {last_line(str(error))}")


def reason(error: Exception) -> str:
    """Return a message for the error of an actor, without the text and traceback that Ray adds."""
    return actor_end(getattr(error, "cause", None) or error).text
