"""The local Ray of one cluster, whose daemons listen on the loopback interface.

States: new → running → (lost: a daemon died, and the cluster with it) → stopped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
from importlib.metadata import version
from pathlib import Path

import psutil

from baton.config.cluster import Config
from baton.errors import BatonError, ConfigError
from baton.telemetry.log_file import BACKUPS, MAX_BYTES
from deploy import ray_internals
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.ray.gcs_process import GcsProbe, GcsProcess, runs
from deploy.ray.gcs_store import PROGRAM, GcsStore
from deploy.workers.ranks import WORKER_RESOURCE
from deploy.workers.ray_worker import namespace
from deploy.workers.standby import PRELOAD_MODULE, PRELOAD_VARIABLE

OBJECT_STORE_BYTES = 80 << 20
"""Size of Ray's object store in bytes, about Ray's minimum: Baton stores no objects in it."""
_DAEMONS = ("gcs_server", "raylet")
_PLACES = 1024
"""Maximum number of workers that Ray may run on this machine. It is high, since pools may grow
while the cluster runs."""
_POLL_S = 0.5
_START_S = 60.0
_SHUTDOWN_S = 10.0
_TOKENS_SINCE = (2, 52)
"""The first Ray version (major, minor) that requires a token from its clients."""


def check_ray() -> None:
    """Raise ConfigError if the installed Ray ignores ``RAY_AUTH_MODE``.

    Without a token, any process that reaches Ray's ports could run code.
    """
    found = version("ray")
    if tuple(map(int, found.split(".")[:2])) < _TOKENS_SINCE:
        oldest = ".".join(map(str, _TOKENS_SINCE))
        raise ConfigError(
            f"Ray {found} does not support tokens: any process that reaches its ports could run "
            f"code. Install Ray {oldest} or newer (pip install 'ray>={oldest}')"
        )


def ray_environment(token_file: Path, *, to_stdout: bool = False) -> dict[str, str]:
    """Return the environment variables for a Ray cluster on the loopback interface. Set them before
    Ray is imported. ``to_stdout`` is that of ``common_environment``."""
    return {
        # Otherwise Ray listens on every interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        **common_environment(to_stdout=to_stdout),
    }


def common_environment(*, to_stdout: bool = False) -> dict[str, str]:
    """Return the environment variables of every Ray node that Baton starts.

    ``to_stdout``: whether the processes on the node write to the standard output and error of the
    process that starts the node, instead of files in Ray's folder.
    """
    own_output = {
        "RAY_LOG_TO_STDERR": "1",
        # Ray's daemons would write hundreds of lines a minute between those of Baton.
        "RAY_BACKEND_LOG_LEVEL": os.environ.get("RAY_BACKEND_LOG_LEVEL", "warning"),
    }
    return {
        **(own_output if to_stdout else {}),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's own default is 512 MiB and five files for each of its processes.
        "RAY_ROTATION_MAX_BYTES": str(MAX_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": str(BACKUPS),
        # Workers import Baton's modules, not those of the folder in which they start.
        "PYTHONSAFEPATH": "1",
        # Ray would add 15: anything else that runs on the host would push the workers aside.
        "RAY_worker_niceness": "0",
        # Ray would end workers and the supervisor whenever another program fills the host.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray would make its workers the kernel's first choice: see baton.host.oom_score.
        "RAY_worker_oom_score_adjustment": "0",
        # Workers that request no GPU from Ray still see the machine's GPUs.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        PRELOAD_VARIABLE: PRELOAD_MODULE,
    }


class RayCluster:
    """The daemons of a local Ray cluster, as children of this process."""

    def __init__(self, config: Config, mark: ClusterMark, run: RunDirectory) -> None:
        self._config = config
        self._mark = mark
        self._run = run
        # The daemons end with the thread that started them, so this thread stays.
        self._thread = DaemonThread("ray")
        self._daemons: list[psutil.Process] = []
        self._started = False
        self._questions = GcsProbe()
        self.gcs: GcsProcess | None = None
        """Ray's control store if it can be restarted; None before the start."""

    async def start(self, gcs_store: GcsStore | None = None) -> None:
        """Start the daemons and connect to them. Raises BatonError, or ConfigError if Ray is too
        old.

        With a store, the cluster survives the death of Ray's control store (GCS).
        """
        check_ray()
        self._started = True
        try:
            async with asyncio.timeout(_START_S):
                address = await self._thread.call(lambda: self._init(gcs_store))
        except TimeoutError:
            raise BatonError(f"Ray did not start within {_START_S:.0f} s") from None
        except (RuntimeError, ValueError, ConnectionError, OSError) as error:
            raise BatonError(f"Ray did not start: {error}") from error
        self._daemons = [child for child in psutil.Process().children() if _name(child) in _DAEMONS]
        if gcs_store is not None:
            self.gcs = self._gcs(gcs_store, address)

    def _gcs(self, store: GcsStore, address: str) -> GcsProcess:
        """Return a handle of the control store's process, which can restart it at the same
        address."""
        first = next(daemon for daemon in self._daemons if _name(daemon) == "gcs_server")
        self._daemons.remove(first)
        # The arguments are those after Ray's program name, without those that the program adds.
        given = first.cmdline()[1 + len(store.flags()) :]
        port = f"--gcs_server_port={address.rpartition(':')[2]}"
        arguments = [port if flag.startswith("--gcs_server_port=") else flag for flag in given]
        program = str(self._run.path / PROGRAM)
        return GcsProcess(first, [program, *arguments], self._mark, self._run)

    async def lost(self) -> str:
        """Wait for the death of a daemon that cannot be restarted, and return its name."""
        while True:
            for daemon in self._daemons:
                if not runs(daemon):
                    return _DAEMON_NAMES[_name(daemon) or _DAEMONS[0]]
            await asyncio.sleep(_POLL_S)

    async def ask_gcs(self, timeout_s: float) -> None:
        """Query the control store for at most about ``timeout_s`` seconds. Raises an error if it
        does not answer."""
        await self._questions.ask(timeout_s)

    async def stop(self) -> bool:
        """Disconnect from Ray and stop its daemons. Returns False if that took too long; the call
        to Ray may then hang."""
        if not self._started:
            return True
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._thread.call(disconnect)
        except TimeoutError:
            return False
        finally:
            if self.gcs is not None:
                await self.gcs.stop()
        return True

    def _init(self, gcs_store: GcsStore | None) -> str:
        """Start Ray. Returns the address of the control store."""
        token = self._run.write_secret("ray-token", secrets.token_hex(32))
        to_stdout = self._config.log_to == "stdout"
        os.environ.update(ray_environment(token, to_stdout=to_stdout) | self._mark.variables)
        if gcs_store is not None:
            os.environ.update(gcs_store.environment())
        import ray  # noqa: PLC0415

        if gcs_store is not None:
            # Any other start would put the password on command lines.
            program = gcs_store.write_program(ray_internals.gcs_program(), self._run)
            ray_internals.set_gcs_program(program)
        # Ray would complain that it cannot handle signals, which the launcher handles.
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray_internals.skip_optional_processes()
        totals = _totals(self._config)
        ray.init(
            address="local",
            # Ray starts one process per CPU in advance, so a CPU per rank saves a second.
            num_cpus=max(totals.pop("CPU", 0), self._config.ranks),
            num_gpus=_gpus(totals.pop("GPU", 0)),
            resources={WORKER_RESOURCE: _PLACES, **totals},
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            namespace=namespace(self._mark.cluster_id),
            job_config=ray_internals.job_without_folders(),
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=str(self._run.ray),
        )
        return str(ray.get_runtime_context().gcs_address)


_DAEMON_NAMES = {"gcs_server": "Ray's control store", "raylet": "Ray's node manager"}


def _totals(config: Config) -> dict[str, int]:
    """Return the total of each Ray resource that the workers of all pools request. This machine
    must offer at least these totals. An empty pool counts as one worker, by which it may grow."""
    totals: dict[str, float] = {}
    for pool in config.pools:
        for name, amount in pool.resources.items():
            totals[name] = totals.get(name, 0) + amount * max(1, pool.count) * pool.ranks
    # Ray accepts fractions for a worker, but not for a machine.
    return {name: math.ceil(amount) for name, amount in totals.items()}


def _gpus(asked: int) -> int | None:
    """Return the ``num_gpus`` argument for Ray: 0 if pools request no GPUs. Otherwise None, with
    which Ray searches for GPUs."""
    return None if asked else 0


def disconnect() -> None:
    """Disconnect from Ray. This also stops the daemons, if this process started them by
    ``ray.init``."""
    import ray  # noqa: PLC0415

    ray.shutdown()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
