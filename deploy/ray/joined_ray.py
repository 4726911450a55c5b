"""A Ray cluster that Baton did not start: this machine's node in it, and the launcher's driver.

A node (``RayNode``) is this machine's Ray daemons:

    new ─start()→ joined ─refuse_work()→ draining (Ray places no actor there) ─stop()→ stopped
    joined, draining ─its node manager dies→ lost

A driver needs a node on its machine. With ``auto`` there is one; otherwise the launcher
(``JoinedRay``) starts one without places for workers:

    new → connected → (lost: its own node died) → stopped
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import BatonError, ConfigError
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.ray.gcs_process import GcsProbe, runs
from deploy.ray.gcs_store import GcsStore
from deploy.ray.ray_cluster import (
    OBJECT_STORE_BYTES,
    check_ray,
    common_environment,
    disconnect,
)
from deploy.ray_internals import NodeProcesses, drain_node, job_without_folders
from deploy.workers.ray_worker import namespace

_START_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.2
_GCS_AWAY_S = 24 * 3600
"""Time after which a node that cannot reach the control store exits, in seconds."""
AUTO = "auto"
_CONNECT_S = 60.0


def check_token() -> None:
    """Raise ConfigError if the installed Ray does not support authentication tokens, or if the
    cluster requires a token and this machine has none."""
    check_ray()
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode == "disabled":
        return
    if mode != "token":
        raise ConfigError(
            f"RAY_AUTH_MODE={mode}: set token, or disabled if that Ray requires no token"
        )
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not os.environ.get("RAY_AUTH_TOKEN") and not path.is_file():
        raise ConfigError(
            f"Ray's token is missing: {path} is not a file. Copy the token of the machine where "
            "Ray's head runs (`ray get-auth-token --generate` makes one there), set "
            "RAY_AUTH_TOKEN_PATH to its file, or set RAY_AUTH_MODE=disabled if that Ray requires "
            "none"
        )


def joined_environment(*, to_stdout: bool = False) -> dict[str, str]:
    """Return the environment variables for Ray in a process that joins a Ray cluster. Set them
    before Ray is imported. ``to_stdout`` is that of ``common_environment``."""
    return {
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_GCS_AWAY_S),
        **common_environment(to_stdout=to_stdout),
    }


def own_address(other: str) -> str:
    """Return the address of this machine at which the machine of ``other`` (host:port) can reach
    it.

    Raises BatonError.
    """
    host, port = split_host_port(other)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BatonError(f"cannot reach {other}: {error.strerror or error}") from error


class RayNode:
    """This machine's node in a Ray cluster. Its daemons are children of this process."""

    def __init__(self, address: str, mark: ClusterMark, *, to_stdout: bool) -> None:
        """``address`` is the host:port of the cluster's control store. ``to_stdout`` is that of
        ``common_environment``."""
        self.address = address
        self._to_stdout = to_stdout
        self.id = ""
        """Ray's id of the node; empty before the node has started."""
        self._mark = mark
        # The daemons end with the thread that started them, so this thread stays.
        self._thread = DaemonThread("ray node")
        self._node: NodeProcesses | None = None
        self._raylet: psutil.Process | None = None

    async def start(
        self, resources: Mapping[str, float], cpus: int, gpus: int, port: int = 0
    ) -> None:
        """Start this machine's node, which joins the cluster with these Ray resources. Raises
        BatonError.

        ``port`` is the port of the node manager; 0 takes any.
        """
        check_token()
        host = own_address(self.address)
        try:
            async with asyncio.timeout(_START_S):
                await self._thread.call(
                    lambda: self._start(host, dict(resources), cpus, gpus, port)
                )
        except TimeoutError:
            raise BatonError(
                f"Ray at {self.address} did not accept this machine within {_START_S:.0f} s: is "
                "its head there, and is the token the same?"
            ) from None
        except (Exception, SystemExit) as error:  # Ray may raise anything
            raise BatonError(f"cannot join Ray at {self.address}: {error}") from error

    def _start(
        self, host: str, resources: dict[str, float], cpus: int, gpus: int, port: int
    ) -> None:
        told = joined_environment(to_stdout=self._to_stdout)
        os.environ.update(told | self._mark.variables)
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._node = NodeProcesses(
            self.address,
            host,
            resources,
            # Ray opens this folder to all users; other users cannot reach its parent.
            RunDirectory(self._mark.run_directory).ray,
            object_store_bytes=OBJECT_STORE_BYTES,
            cpus=cpus,
            gpus=gpus,
            port=port,
        )
        self.id = self._node.id
        children = psutil.Process().children()
        self._raylet = next(child for child in children if child.name() == "raylet")

    @property
    def host(self) -> str:
        """Return the node's address."""
        assert self._node is not None, "it has started"
        return self._node.host

    async def lost(self) -> str:
        """Wait for the death of the node's manager process. Returns the name of the process."""
        assert self._raylet is not None, "it has started"
        while runs(self._raylet):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return "Ray's node manager"

    async def stop(self) -> None:
        """Stop the node's daemons, and everything that Ray runs on the node; idempotent."""
        if self._node is None:
            return
        node, self._node = self._node, None
        try:
            async with asyncio.timeout(_STOP_S):
                await self._thread.call(node.end)
        except (Exception, SystemExit) as error:
            logging.getLogger(__name__).warning("Ray's node does not end: %s", error)


def refuse_work(address: str, node: str, for_s: float) -> None:
    """Make Ray place no more workers on a node, because the node ends within ``for_s`` seconds.

    Blocks for a few seconds at most. Raises BatonError if Ray refuses.
    """
    os.environ.update(joined_environment())
    until_ms = int((time.time() + for_s) * 1000)
    try:
        taken, why = drain_node(address, node, "this node is leaving", until_ms)
    except Exception as error:  # Ray may raise anything while its control store is unreachable
        raise BatonError(f"Ray does not answer: {error}") from error
    if not taken:
        raise BatonError(f"Ray keeps placing workers here: {why}")


class JoinedRay:
    """The launcher's connection to a Ray cluster that Baton did not start. It has the methods of
    ``deploy.ray.ray_cluster.RayCluster``."""

    gcs = None
    """Handle of the control store; None, since the launcher cannot restart one that it did not
    start."""

    def __init__(self, config: Config, mark: ClusterMark) -> None:
        self._mark = mark
        self._node = None
        if config.ray_address != AUTO:
            to_stdout = config.log_to == "stdout"
            self._node = RayNode(config.ray_address, mark, to_stdout=to_stdout)
        self._thread = DaemonThread("ray")
        self._questions = GcsProbe()
        self._started = False

    async def start(self, gcs_store: GcsStore | None = None) -> None:
        """Connect to the Ray cluster. Raises BatonError. ``gcs_store`` is ignored, since this Ray
        cluster was started with or without a store."""
        check_token()
        if self._node is not None:
            await self._node.start({}, cpus=0, gpus=0)
        self._started = True
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._thread.call(self._connect)
        except TimeoutError:
            raise BatonError(f"Ray did not answer within {_CONNECT_S:.0f} s") from None
        except (Exception, SystemExit) as error:  # Ray may raise anything
            raise BatonError(f"cannot use Ray: {error}") from error

    def _connect(self) -> None:
        os.environ.update(joined_environment() | self._mark.variables)
        import ray  # noqa: PLC0415

        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.init(
            address=AUTO if self._node is None else self._node.address,
            namespace=namespace(self._mark.cluster_id),
            job_config=job_without_folders(),
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _node_ip_address=None if self._node is None else self._node.host,
        )

    async def lost(self) -> str:
        """Wait for the death of the launcher's own node; wait forever if the launcher has none."""
        if self._node is None:
            await asyncio.Event().wait()
        assert self._node is not None
        return await self._node.lost()

    async def ask_gcs(self, timeout_s: float) -> None:
        """Query the control store for at most about ``timeout_s`` seconds. Raises an error if it
        does not answer."""
        await self._questions.ask(timeout_s)

    async def stop(self) -> bool:
        """Disconnect from Ray, and stop the launcher's own node. Returns False if that took too
        long; the call to Ray may then hang."""
        if not self._started:
            return True
        try:
            async with asyncio.timeout(_STOP_S):
                await self._thread.call(disconnect)
        except TimeoutError:
            return False
        finally:
            if self._node is not None:
                await self._node.stop()
        return True
