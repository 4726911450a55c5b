"""A Ray node that runs workers: the share of each worker, and the list of running workers.

A node is a machine, or a container. It has a run directory: the launcher's, if the launcher started
the node; that of `baton join`; or one that its workers make. Each worker process locks a file in
it, named by the worker's number, until the process ends for any reason. The file identifies the
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from baton.config.cluster import Config
from baton.errors import BatonError, ConfigError
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.run_directory import RUN_VARIABLE, RunDirectory
from deploy.workers.actor_settings import ActorSettings

log = logging.getLogger(__name__)

CORE_LINES = 8
"""Maximum number of workers, in addition to those of the configuration, that can share a node's
cores dynamically. Further workers get a fixed number of cores."""
PLACES_VARIABLE = "BATON_NODE_PLACES"
"""Name of the environment variable that has the maximum number of workers of a node that has joined
a Ray cluster."""
_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What one worker process may use of its node: address, number, log file and cores."""

    host: str
    """Address at which the worker's servers listen and are reached."""
    run: RunDirectory
    """The node's run directory."""
    log_file: Path
    number: int
    """Number of the worker process on this node, from 0. Each rank of a worker has its own
    number."""
    workers_here: int
    """Maximum number of workers on the node; each rank counts as one."""
    threads: int
    """Number of compute threads of an engine on the CPU, if the engine cannot change that number
    from step to step."""
    core_board: str
    """Path of the file through which the node's workers share its cores; empty if this worker's
    number of threads is fixed."""
    core_lines: int
    """Maximum number of workers that share cores through the file ``core_board``."""

    @classmethod
    def take(
        cls, settings: ActorSettings, host: str, node: str = "", gcs: str = "", rank: int = 0
    ) -> NodeShare:
        """Register this process on its node until it ends, and return its share. Raises OSError.

        Each rank of a worker registers itself. ``host`` is the node's address. ``node`` is Ray's id
        of the node. ``gcs`` is the address of Ray's control store.
        """
        config = Config(**settings.config)
        run = run_directory_here(settings.cluster_id)
        name = f"{settings.slot}.rank-{rank}" if rank else settings.slot
        number = NodeWorkers(run.workers).register(
            name, settings.drain_s, node, gcs, settings.cluster_id
        )
        workers = workers_of_node(config.ranks)
        own_threads = settings.pool_of(config).threads
        lines = workers + CORE_LINES
        # Workers for which the file has no line take a fixed share of the cores.
        shares = not own_threads and number < lines
        return cls(
            host=host,
            run=run,
            log_file=run.log(name),
            number=number,
            workers_here=workers,
            threads=own_threads or max(1, (os.cpu_count() or 1) // workers),
            core_board=str(run.path / "cores") if shares else "",
            core_lines=lines,
        )


def run_directory_here(cluster_id: str) -> RunDirectory:
    """Return the run directory of this node. Raises OSError if another user owns it."""
    given = os.environ.get(RUN_VARIABLE)
    if given:
        return RunDirectory(Path(given))
    return RunDirectory.of_node(cluster_id)


def workers_of_node(of_cluster: int) -> int:
    """Return how many of a cluster's ``of_cluster`` workers may run on this node. Each rank counts
    as a worker."""
    places = os.environ.get(PLACES_VARIABLE, "")
    return max(1, min(of_cluster, int(places))) if places.isdecimal() else of_cluster


def model_paths(settings: ActorSettings) -> tuple[str, str]:
    """Return the folders of the model and of the drafter on this node.

    On the launcher's machine the folders exist already. Elsewhere one worker of the node downloads
    and converts the models, and the others wait. Raises BatonError.
    """
    if settings.launcher.is_near:
        return settings.model_path, settings.draft_model_path
    # The import is slow, and the launcher's own workers do not need it.
    from deploy.models import model_store  # noqa: PLC0415
    from deploy.models.model_store import resolve_drafter  # noqa: PLC0415
    from deploy.processes.progress import log_progress  # noqa: PLC0415

    config = Config(**settings.config)
    try:
        model = model_store.resolve(
            config.model, log_progress, config.quantization, config.revision
        )
        drafter = ""
        if config.draft_model:
            found = resolve_drafter(
                config.drafter, config.draft_model, log_progress, config.draft_revision
            )
            drafter = str(found.path)
    except BatonError as error:
        raise ConfigError(f"on this worker's node: {error.message}") from error
    return str(model.path), drafter


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A process that runs a worker, or one rank of a worker."""

    slot: str
    process: ProcessIdentity
    drain_s: float
    """Maximum time that the worker may take to exit after SIGTERM, in seconds."""
    node: str = ""
    """Ray's id of the worker's node."""
    gcs: str = ""
    """Address of Ray's control store, host:port."""
    cluster: str = ""
    """Id of the worker's cluster."""


_NODE_WORKER = TypeAdapter(NodeWorker)


class NodeWorkers:
    """The list of the worker processes of one node, as locked files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def register(
        self, slot: str, drain_s: float, node: str = "", gcs: str = "", cluster: str = ""
    ) -> int:
        """Add this process to the node's list until it ends, and return the process's number on the
        node: the lowest free one. On a full disk the process may only get its number. Raises
        OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        me = NodeWorker(slot, ProcessIdentity.own(), drain_s, node, gcs, cluster)
        for number in range(_MOST):
            path = self._folder / str(number)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _lock(descriptor):
                os.close(descriptor)
                continue
            # The file is never closed: its lock ends with the process.
            self._write(descriptor, json.dumps(asdict(me)).encode())
            return number
        raise OSError(f"no number is free in {self._folder}")

    def _write(self, descriptor: int, me: bytes) -> None:
        # Over what a dead process has left: a full disk has room for that.
        written = 0
        try:
            written = os.pwrite(descriptor, me, 0)
        except OSError as error:
            log.warning(
                "%s cannot be written: %s; the worker is not on the list", self._folder, error
            )
        os.ftruncate(descriptor, written if written == len(me) else 0)

    def running(self) -> list[NodeWorker]:
        """Return the worker processes on the list that are running."""
        found = []
        for path in sorted(self._folder.glob("[0-9]*")):
            with contextlib.suppress(OSError, ValueError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if not _lock(descriptor):
                        said = os.pread(descriptor, 1 << 16, 0)
                        found.append(_NODE_WORKER.validate_json(said))
                finally:
                    os.close(descriptor)
        return found


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
