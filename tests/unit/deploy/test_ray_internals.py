"""The installed Ray has what ``deploy/ray_internals.py`` uses; each failure names what is gone."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from deploy import ray_internals
from tests.support.private_names import find, missing

USER = "deploy/ray_internals.py"
_DRAIN = "ray.core.generated.autoscaler_pb2"
_ACTOR = "ray.core.generated.gcs_pb2.ActorTableData"
_CAUSE = "ray.core.generated.common_pb2.ActorDeathCause"
_REQUEST = "ray.core.generated.node_manager_pb2.PrestartWorkersRequest"
_NODE = "ray._private.node.Node"
NAMES = (
    "ray._private.services.GCS_SERVER_EXECUTABLE",
    "ray._private.accelerators.NvidiaGPUAcceleratorManager.get_current_node_num_accelerators",
    "ray._private.grpc_utils.init_grpc_channel(address)",
    "ray._private.worker.global_worker.node",
    "ray._private.parameter.RayParams(gcs_address, node_ip_address, node_manager_port, num_cpus)",
    "ray._private.parameter.RayParams(num_gpus, resources, object_store_memory)",
    "ray._private.parameter.RayParams(raylet_socket_name, plasma_store_socket_name)",
    "ray._private.parameter.RayParams(include_log_monitor)",
    f"{_NODE}(ray_params, head, shutdown_at_exit, spawn_reaper)",
    f"{_NODE}.start_monitor",
    f"{_NODE}.start_api_server",
    f"{_NODE}.start_log_monitor",
    f"{_NODE}.kill_all_processes(check_alive, allow_graceful)",
    f"{_NODE}.get_session_dir_path",
    f"{_NODE}.node_id",
    f"{_NODE}.node_ip_address",
    f"{_NODE}.node_manager_port",
    "ray.job_config.JobConfig(_py_driver_sys_path)",
    "ray._private.state.actors(actor_id, actor_state_name)",
    "ray.actor.ActorHandle._actor_id",
    "ray.exceptions.ActorDiedError(cause)",
    "ray.exceptions.OutOfMemoryError(message)",
    f"{_ACTOR}.DEATH_CAUSE_FIELD_NUMBER",
    f"{_CAUSE}.OOM_CONTEXT_FIELD_NUMBER",
    f"{_CAUSE}.ACTOR_DIED_ERROR_CONTEXT_FIELD_NUMBER",
    # Compiled: their parameters cannot be seen.
    "ray._raylet.GcsClient",
    "ray._raylet.InnerGcsClient.drain_node",
    "ray._raylet.InnerGcsClient.internal_kv_get",
    f"{_DRAIN}.DrainNodeReason",
    f"{_DRAIN}.DRAIN_NODE_REASON_PREEMPTION",
    "ray.core.generated.common_pb2.Language",
    "ray.core.generated.common_pb2.PYTHON",
    "ray.core.generated.node_manager_pb2_grpc.NodeManagerServiceServicer.PrestartWorkers",
    "ray.core.generated.node_manager_pb2_grpc.NodeManagerServiceStub(channel)",
    f"{_REQUEST}.LANGUAGE_FIELD_NUMBER",
    f"{_REQUEST}.JOB_ID_FIELD_NUMBER",
    f"{_REQUEST}.KEEP_ALIVE_DURATION_SECS_FIELD_NUMBER",
    f"{_REQUEST}.NUM_WORKERS_FIELD_NUMBER",
    f"{_REQUEST}.RUNTIME_ENV_INFO_FIELD_NUMBER",
    "ray.core.generated.runtime_environment_pb2.RuntimeEnvInfo.SERIALIZED_RUNTIME_ENV_FIELD_NUMBER",
)


def test_ray_has_all_of_it() -> None:
    assert missing(USER, NAMES) == []


def test_ray_still_reads_what_is_set() -> None:
    """Each of these Ray looks up when it starts a node, or sets when a process connects."""
    for reader, what in (
        ("ray.init", '"_temp_dir"'),
        ("ray._private.services.start_gcs_server", "GCS_SERVER_EXECUTABLE"),
        (f"{_NODE}.start_head_processes", "self.start_monitor("),
        (f"{_NODE}.start_head_processes", "self.start_api_server("),
        (f"{_NODE}.start_ray_processes", "self.start_log_monitor("),
        ("ray._private.worker.connect", "worker.gcs_client ="),
        ("ray._private.worker.connect", "job_config._py_driver_sys_path.extend("),
        ("ray._private.worker.connect", "worker.node ="),
    ):
        assert missing(USER, [reader]) == []
        assert what in inspect.getsource(find(reader)), f"{reader} has no {what} now: see {USER}"


def test_a_job_gives_its_workers_no_folder_to_import_from() -> None:
    job = ray_internals.job_without_folders()
    job._py_driver_sys_path.extend(["/folder/of/the/caller"])
    assert list(job._get_proto_job_config().py_driver_sys_path) == []


def test_the_list_is_complete() -> None:
    tree = ast.parse(Path(ray_internals.__file__).read_text(encoding="utf-8"))
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ray")
        for alias in node.names
    }
    assert len(imported) > 5
    unlisted = {one for one in imported if not any(name.startswith(one) for name in NAMES)}
    assert unlisted == set()
