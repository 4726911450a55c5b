"""Wraps the parts of Ray beyond its public API; no other module may use them.

Ray may change these names in any release, so pyproject.toml admits only the minor versions of Ray
that pass tests/unit/deploy/test_ray_internals.py, which lists every one of them. After an upgrade
that test shows which names are gone. Every function imports Ray when it is called.
"""

# ruff: noqa: PLC0415
from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

_OPTIONAL_PROCESSES = ("start_monitor", "start_api_server", "start_log_monitor")
_NO_JOB = b"\xff" * 4
"""The job id of a worker process that Ray has assigned to no job. Ray may give it to an actor of
any job."""


def gcs_program() -> str:
    """Return the path of the control store (GCS) that nodes of this process start."""
    from ray._private import services

    return str(services.GCS_SERVER_EXECUTABLE)


def set_gcs_program(program: Path) -> None:
    """Make nodes of this process start ``program`` as the control store."""
    from ray._private import services

    services.GCS_SERVER_EXECUTABLE = str(program)


def skip_optional_processes() -> None:
    """Make nodes of this process start without autoscaler, dashboard and log monitor.

    Baton uses none of them. Each takes a second of a core to start, and 60 to 80 MiB. Ray has no
    public setting for this.
    """
    from ray._private.node import Node

    for name in _OPTIONAL_PROCESSES:
        setattr(Node, name, lambda *_, **__: None)


def job_without_folders() -> Any:
    """Return a ``job_config`` for ``ray.init`` whose workers get no folder to import modules from.

    Ray puts the current folder of the connecting process first in the import path of its workers:
    a ``router.py`` or ``worker/`` there would replace Baton's.
    """
    from ray.job_config import JobConfig

    job = JobConfig()
    job._py_driver_sys_path = _NoFolders()
    return job


class _NoFolders(list[str]):
    def extend(self, folders: Iterable[str], /) -> None:
        """Ignore ``folders``, which Ray would add to the import path of its workers."""


def read_gcs_key(key: bytes, timeout_s: float) -> None:
    """Read ``key`` from the control store of the connected cluster; a missing key is no error.

    Ray's public call takes no deadline. Raises what Ray raises when there is no answer.
    """
    _worker().gcs_client.internal_kv_get(key, None, timeout=timeout_s)


def session_folder() -> Path:
    """Return the folder of the connected cluster's session on this node."""
    return Path(_worker().node.get_session_dir_path())


def prestart_worker(keep_alive_s: int, timeout_s: float) -> None:
    """Make this node's raylet start one idle worker process.

    Ray keeps that process for ``keep_alive_s`` seconds, however many idle processes it has. Blocks
    for at most ``timeout_s`` seconds. Raises what Ray or gRPC raises.
    """
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

    messages: Any = node_manager_pb2
    languages: Any = common_pb2
    services: Any = node_manager_pb2_grpc
    open_channel: Any = init_grpc_channel
    request = messages.PrestartWorkersRequest(
        language=languages.Language.Value("PYTHON"),
        job_id=_NO_JOB,
        keep_alive_duration_secs=keep_alive_s,
        num_workers=1,
    )
    request.runtime_env_info.serialized_runtime_env = "{}"
    node = _worker().node
    with open_channel(f"{node.node_ip_address}:{node.node_manager_port}") as channel:
        services.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=timeout_s)


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that Ray finds on this machine."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return int(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators())


def death_of(name: str, pid: int) -> Exception | None:
    """Return the error that calls to a dead actor would raise; None if the control store does not
    know why it died.

    ``name`` and ``pid`` are those of the actor and its process. Blocks while the control store is
    unreachable. Raises what Ray raises.
    """
    from ray._private.state import actors
    from ray.exceptions import ActorDiedError, OutOfMemoryError

    list_actors: Any = actors
    out_of_memory: Any = OutOfMemoryError
    for actor in list_actors(actor_state_name="DEAD").values():
        if (actor["Name"], actor["Pid"]) != (name, pid):
            continue
        cause = actor["DeathCause"]
        if cause.HasField("oom_context"):
            return cast(Exception, out_of_memory(cause.oom_context.error_message))
        if cause.HasField("actor_died_error_context"):
            return ActorDiedError(cause.actor_died_error_context)
    return None


def is_unplaced(actor: Any) -> bool:
    """Return whether an actor waits for a node that has the resources that it asked for.

    ``actor`` is a handle. Blocks while the control store is unreachable. Raises what Ray raises.
    """
    from ray._private.state import actors

    describe_actor: Any = actors
    found = describe_actor(actor_id=actor._actor_id.hex())
    return bool(found) and found["State"] == "PENDING_CREATION" and not found["Pid"]


def drain_node(address: str, node: str, why: str, until_ms: int) -> tuple[bool, str]:
    """Make Ray place no more actors on ``node``, which ends by ``until_ms`` (Unix time).

    ``address`` is host:port of the control store. Returns whether Ray accepts, and its reason if
    not. Raises what Ray raises.
    """
    from ray import _raylet
    from ray.core.generated import autoscaler_pb2

    raylet: Any = _raylet
    messages: Any = autoscaler_pb2
    reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, refusal = raylet.GcsClient(address=address).drain_node(node, reason, why, until_ms)
    return bool(accepted), str(refusal)


class NodeProcesses:
    """A Ray node whose processes are children of this process.

    `ray start --address --block` does the same with one more process, and refuses a loopback
    address. The raylet ends with the thread that makes this object.
    """

    def __init__(
        self,
        gcs_address: str,
        host: str,
        resources: Mapping[str, float],
        sockets: Path,
        *,
        object_store_bytes: int,
        cpus: int = 0,
        gpus: int = 0,
        port: int = 0,
    ) -> None:
        """Join the cluster of the control store at ``gcs_address`` (host:port) as ``host``.

        ``sockets`` is a folder of this node's own: nodes that start on one machine at the same time
        would choose the same names in Ray's folder. ``port`` is the port of the raylet; 0 takes
        any. Raises what Ray raises, SystemExit included.
        """
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        make_parameters: Any = RayParams
        parameters = make_parameters(
            gcs_address=gcs_address,
            node_ip_address=host,
            node_manager_port=port,
            num_cpus=cpus,
            num_gpus=gpus,
            resources=dict(resources),
            object_store_memory=object_store_bytes,
            raylet_socket_name=str(sockets / "raylet"),
            plasma_store_socket_name=str(sockets / "plasma"),
            include_log_monitor=False,
        )
        self._node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)

    @property
    def id(self) -> str:
        """Return Ray's id of the node."""
        return str(self._node.node_id)

    @property
    def host(self) -> str:
        """Return the node's address."""
        return str(self._node.node_ip_address)

    def end(self) -> None:
        """Stop the raylet, and with it the workers that it runs. Raises what Ray raises."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=True)


def _worker() -> Any:
    """Return Ray's object for this process, which must be connected to a Ray cluster."""
    from ray._private.worker import global_worker

    return global_worker
