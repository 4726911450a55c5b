"""Baton takes the command lines, variables and configurations of the processes in the pods."""

from __future__ import annotations

import json
import re
import shlex
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.config.cluster import Config, load_config
from baton.config.worker_fields import WORKER_FIELDS
from deploy.cli.main import app
from deploy.launcher.plain_worker import pool_of
from deploy.launcher.preflight import check_exposure
from tests.support.deploy.baton_commands import parse, unknown_variables
from tests.support.deploy.chart import (
    CHART,
    DISAGGREGATED_SETS,
    KUBERAY_SETS,
    STANDALONE_SETS,
    VALUE_SETS,
    component,
    containers,
    environment,
    of_kind,
    pods,
    render,
    the,
)

ENTRYPOINT = ["tini", "--", "baton"]
"""The image's own."""
each_set = pytest.mark.parametrize("value_set", VALUE_SETS)


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of each process of a set of values, by the name of its container: its file
    and its variables."""

    def read(value_set: str, *more: str) -> dict[str, Config]:
        manifests = render(value_set, *more)
        found = {}
        for name, pod in pods(manifests):
            for container in pod["spec"]["containers"]:
                volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
                if "config" not in volumes or component(pod) in ("index", "gcs"):
                    continue
                secret = volumes["config"]["secret"]["secretName"]
                text = the(manifests, "Secret", secret)["stringData"]["baton.toml"]
                file = tmp_path / "baton.toml"
                file.write_text(text)
                with monkeypatch.context() as patch:
                    for variable, value in environment(container, manifests).items():
                        patch.setenv(variable, value)
                    found[f"{name}/{container['name']}"] = load_config(file)
        return found

    return read


@each_set
def test_baton_takes_its_command_lines(value_set: str) -> None:
    """With the parser of the real command line: no flag is made up."""
    seen = set()
    for name, container in containers(render(value_set)):
        if not container["image"].split(":")[0].endswith("baton"):
            continue
        command = container.get("command", ENTRYPOINT)
        if command == ENTRYPOINT:
            seen.add(parse(container["args"]).name)
        else:
            others = ("RayCluster/demo-baton-ray/head/ray-head", "-launcher/ray-certificate")
            assert name.endswith(others)
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if hook[:1] == ["baton"]:
            seen.add(parse(hook[1:]).name)
    expected = {"status", "serve"}
    if value_set in KUBERAY_SETS:
        expected = {"status", "serve", "join", "leave", "router"}
    if value_set in DISAGGREGATED_SETS:
        expected = {"status", "worker", "router", "pull"}
    # Models of a volume are not pulled.
    assert seen - {"pull"} == expected - {"pull"}
    assert ("pull" in seen) is (value_set in (*DISAGGREGATED_SETS, "kuberay-plain-values.yaml"))


@each_set
def test_baton_reads_its_variables(value_set: str) -> None:
    for name, container in containers(render(value_set)):
        names = [one["name"] for one in container.get("env", ())]
        assert unknown_variables(names) == []
        assert len(set(names)) == len(names), name


@each_set
def test_the_file_names_are_those_that_the_command_reads(value_set: str) -> None:
    for name, pod in pods(render(value_set)):
        for container in pod["spec"]["containers"]:
            if not name.endswith(("/baton", "/launcher", "/router", "/worker")):
                continue
            file = Path(parse(container["args"]).parameters["config"])
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert str(file.parent) in mounts
            volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
            items = volumes["config"]["secret"]["items"]
            assert items == [{"key": file.name, "path": file.name}]


@pytest.mark.parametrize("value_set", [one for one in VALUE_SETS if one != "stores-values.yaml"])
def test_processes_start_with_their_configurations(value_set: str, configuration: Any) -> None:
    """As far as they check them before they connect to anything."""
    for name, config in configuration(value_set).items():
        host = "10.1.2.3" if name.endswith("/worker") else ""
        check_exposure(config, worker_host=host)


@pytest.mark.parametrize("value_set", ["open-values.yaml", "standalone-values.yaml"])
def test_the_configuration_is_the_one_of_the_values(value_set: str, configuration: Any) -> None:
    (config,) = configuration(value_set).values()
    assert config.http.endswith(":8000")
    assert config.grpc.endswith(":8001")
    assert config.admin_http.endswith(":8002")
    assert config.routers == 2
    if value_set == "standalone-values.yaml":
        assert config.require_key
        assert config.max_file_bytes == 100 << 20
        assert [key.name for key in config.keys] == ["example", "operator"]
        assert config.tenant_weights["acme"] == 2
        assert [(pool.name, pool.count, pool.resources) for pool in config.pools] == [
            ("prefill", 1, {"GPU": 1.0}),
            ("decode", 3, {"GPU": 1.0}),
        ]
        assert config.slo_ttft_of("long") == 4.5
        assert config.redis_url
        assert config.gcs_store
    else:
        assert not config.require_key
        assert config.redis_url == ""
        assert config.gcs_store == "embedded"


@pytest.mark.parametrize("value_set", KUBERAY_SETS + DISAGGREGATED_SETS)
def test_processes_are_of_one_cluster(value_set: str, configuration: Any) -> None:
    configs = {name.rpartition("/")[2]: one for name, one in configuration(value_set).items()}
    router = configs.pop("router")
    assert router.http == "0.0.0.0:8000"
    assert router.grpc == "0.0.0.0:8001"
    assert router.admin_http == "0.0.0.0:8002"
    for other in configs.values():
        for field in ("cluster_id", "cluster_secret", "model", "revision"):
            assert getattr(other, field) == getattr(router, field)
        assert other.metrics_port
        assert other.log_format == router.log_format == "json"
        assert other.log_to == router.log_to == "stdout"
    assert router.cluster_id == (
        "llama" if value_set == "disaggregated-values.yaml" else "demo-baton"
    )
    if value_set in KUBERAY_SETS:
        launcher = configs["launcher"]
        # KubeRay's certificate of the head has the long name alone.
        tail = ".default.svc.cluster.local" if value_set == "kuberay-values.yaml" else ""
        assert launcher.ray_address == f"demo-baton-ray-head-svc{tail}:6379"
        assert launcher.leave_workers
        assert launcher.routers == 0
        assert launcher.pools == router.pools
        for pool in launcher.pools:
            assert pool.resources[f"baton_{pool.role}"] == 1


@pytest.mark.parametrize(
    "value_set", ["disaggregated-values.yaml", "disaggregated-plain-values.yaml"]
)
def test_each_pool_has_a_deployment_of_workers(value_set: str, configuration: Any) -> None:
    manifests = render(value_set)
    configs = configuration(value_set)
    (router,) = [config for name, config in configs.items() if name.endswith("/router")]
    for pool in router.pools:
        name = f"demo-baton-{pool.name}"
        deployment = the(manifests, "Deployment", name)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        run = parse(container["args"]).parameters
        config = configs[f"Deployment/{name}/worker"]
        assert pool_of(config, run["role"], run["pool"]).name == pool.name
        # The pod's own address, which a variable has.
        assert run["host"] == "$(POD_IP)"
        assert container["env"][0] == {
            "name": "POD_IP",
            "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
        }
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert ports == {"probes": run["probe_port"], "metrics": config.worker_metrics_ports[0]}
        # Spare GPUs are not needed to replace one.
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {
            "maxSurge": 0,
            "maxUnavailable": 1,
        }
        # Routers know how many there are at least, and what changes it.
        started = deployment["spec"].get("replicas")
        assert pool.count == (started if started is not None else 2 + (pool.role == "decode"))
        command = router.scale_command.format(pool=pool.name, count=3)
        assert command == f"kubectl --namespace default scale deployment/{name} --replicas=3"
    assert len(of_kind(manifests, "Deployment")) == len(router.pools) + 1


def test_workers_know_what_they_read_and_nothing_else(configuration: Any) -> None:
    """Every field has a value that is not its default."""
    values: dict[str, Any] = {
        "allowed_hosts": ["a"],
        "keys_file": "/etc/keys",
        "policy": "least_loaded",
        "autoscaler": {"enabled": False},
        "advanced": {"head_deadline_s": 7, "hang_s": 3},
        "max_model_len": 512,
        "slo_tpot_s": 0.2,
        "trace_ratio": 0.5,
        "max_pinned_fraction": 0.25,
        "log_level": "debug",
    }
    tenants = [{"name": "acme", "max_pinned_fraction": 0.5}, {"name": "other", "weight": 2}]
    more = [f"--set-json=config.{name}={json.dumps(value)}" for name, value in values.items()]
    more.append(f"--set-json=auth.tenants={json.dumps(tenants)}")
    manifests = render("disaggregated-values.yaml", *more)
    text = the(manifests, "Secret", "demo-baton-worker")["stringData"]["baton.toml"]
    told = tomllib.loads(text)
    assert told.keys() <= WORKER_FIELDS.keys()
    assert told["advanced"] == {"hang_s": 3}
    assert told["tenants"] == [{"name": "acme", "max_pinned_fraction": 0.5}]
    for name in values.keys() & WORKER_FIELDS.keys() - {"advanced"}:
        assert told[name] == values[name]
    # What they read of a router's configuration, they read in their own too.
    configs = configuration("disaggregated-values.yaml", *more)
    router = configs["Deployment/demo-baton-router/router"]
    worker = configs["Deployment/demo-baton-decode/worker"]
    include = {name: part for name, part in WORKER_FIELDS.items() if name != "tenants"}
    counts = {pool.name: 1 for pool in router.pools}
    read, known = (one.model_dump(include=include) for one in (worker, router))
    for pool in known["pools"]:
        pool["count"] = counts[pool["name"]]
    # Both have the variable of their own pod.
    assert read | {"metrics_port": 0} == known


def test_the_chart_passes_every_field_that_workers_read() -> None:
    template = (CHART / "templates" / "_config.tpl").read_text()
    (listed,) = re.findall(r'pick \$config ("model".*?) }}', template)
    (advanced,) = re.findall(r'"advanced" \(pick \. (.*?)\) }}', template)
    # Variables have the others, and tenants are picked one by one.
    elsewhere = {"tls", "metrics_port", "cluster_secret", "tenants"}
    assert set(shlex.split(listed)) == WORKER_FIELDS.keys() - elsewhere
    assert set(shlex.split(advanced)) == WORKER_FIELDS["advanced"]


def test_a_pool_may_say_its_own_count(configuration: Any) -> None:
    """Several pools of a role, and one that starts empty."""
    pools = (
        '[{"name": "prefill", "role": "prefill", "count": 0},'
        ' {"name": "short", "role": "decode", "count": 3}, {"name": "long", "role": "decode"}]'
    )
    more = (f"--set-json=config.pools={pools}", "--set=workers.decode.replicas=2")
    manifests = render("disaggregated-plain-values.yaml", *more)
    counts = {"prefill": 0, "short": 3, "long": 2}
    for name, count in counts.items():
        assert the(manifests, "Deployment", f"demo-baton-{name}")["spec"]["replicas"] == count
    configs = configuration("disaggregated-plain-values.yaml", *more)
    (router,) = [config for name, config in configs.items() if name.endswith("/router")]
    assert {pool.name: pool.count for pool in router.pools} == counts


@pytest.mark.parametrize("value_set", ["disaggregated-values.yaml", "kuberay-plain-values.yaml"])
def test_models_are_pulled_before_workers_start(value_set: str, configuration: Any) -> None:
    manifests = render(value_set)
    models = set()
    for name, pod in pods(manifests):
        if component(pod) not in ("worker", "ray") or name.endswith("/head"):
            assert "initContainers" not in pod["spec"]
            continue
        (pull,) = pod["spec"]["initContainers"]
        run = parse(pull["args"]).parameters
        models.add((run["name"], run["revision"]))
        # Into the cache that the worker reads, without a device of it.
        (worker,) = pod["spec"]["containers"]
        cache = {"name": "cache", "mountPath": "/var/cache/baton"}
        assert cache in pull["volumeMounts"]
        assert cache in worker["volumeMounts"]
        assert "nvidia.com/gpu" not in pull["resources"]["limits"]
        token = [one for one in pull.get("env", ()) if one["name"] == "HF_TOKEN"]
        assert bool(token) is (value_set == "disaggregated-values.yaml")
    config = next(iter(configuration(value_set).values()))
    assert models == {(config.model, config.revision)}


def test_a_draft_model_is_pulled_too() -> None:
    more = "--set=config.draft_model=example/small,config.drafter=draft,config.draft_revision=v1"
    manifests = render("disaggregated-plain-values.yaml", more)
    pod = the(manifests, "Deployment", "demo-baton-decode")["spec"]["template"]["spec"]
    commands = [parse(one["args"]).parameters for one in pod["initContainers"]]
    assert [(one["name"], one["revision"]) for one in commands] == [
        ("example/small", "v1"),
        ("smollm2-135m-instruct", ""),
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), False),
        (("--set=redis.mode=valkey,redis.password=a",), True),
        (("--set=redis.mode=external,redis.url=rediss://:a@b",), False),
        (("--set=redis.mode=external,redis.url=redis://:a@b,redis.insecure=true",), True),
        (("--set=gcsStore.mode=external,gcsStore.url=redis://b,gcsStore.insecure=true",), True),
    ],
)
def test_redis_without_tls_is_allowed_if_the_values_allow_it(
    changes: tuple[str, ...], told: bool, configuration: Any
) -> None:
    (config,) = configuration("open-values.yaml", *changes).values()
    assert config.insecure_redis is told


@contextmanager
def locked_front(status: int) -> Iterator[str]:
    """host:port of a front whose /health says ``status``, and which shows all else to keys."""

    class Front(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"error": {"message": "an API key that allows metrics is required"}}'
            if self.path == "/health":
                body = b'{"status": "ok"}' if status == 200 else b'{"status": "unavailable"}'
            self.send_response(status if self.path == "/health" else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 4)])
@pytest.mark.parametrize("value_set", [STANDALONE_SETS[1], "disaggregated-plain-values.yaml"])
def test_helm_test_needs_no_key_where_others_do(value_set: str, status: int, code: int) -> None:
    """What its pod runs, against a front that shows nothing but its health without one."""
    manifests = render(value_set)
    pod = the(manifests, "Pod", "demo-baton-health")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert "env" not in container
    (port,) = the(manifests, "Service", "demo-baton-admin")["spec"]["ports"]
    service = f"demo-baton-admin.default.svc:{port['port']}"
    assert service in container["args"]
    with locked_front(status) as front:
        arguments = [front if one == service else one for one in container["args"]]
        done = CliRunner(env={"BATON_API_KEY": None}).invoke(app, arguments)
    assert done.exit_code == code, done.output
    assert "an API key that allows metrics is required" in " ".join(done.output.split())
