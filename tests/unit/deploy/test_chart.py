"""The Helm chart: what it renders is valid, and fits what Baton can do."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from typer.testing import CliRunner

from baton.config.cluster import load_config
from baton.valkey_binary import valkey_binary
from deploy.cli.main import app
from deploy.launcher.node_agent import ENDING_S as LEAVING_S
from deploy.processes.ports import free_port
from deploy.workers.ranks import WORKER_RESOURCE
from router.access.access import listed_scope, scope_of_service
from tests.support.deploy.baton_commands import parse, unknown_variables
from tests.support.deploy.chart import (
    VALUE_SETS,
    containers,
    lint,
    of_kind,
    pods,
    refusal,
    render,
    the,
)

ROOT = Path(__file__).parents[3]
RAY_SCHEMA = ROOT.parent / "shared" / "schemas" / "raycluster-ray-v1.json"
ENTRYPOINT = ["tini", "--", "baton"]
"""The image's own."""
OLDEST, NEWEST = "1.27", "1.37"
"""Of Kubernetes: what Chart.yaml asks for at least, and what the schemas that tests have know."""
KUBERAY_SETS = [name for name in VALUE_SETS if name.startswith("kuberay")]
NOT_OF_KUBERNETES = ("RayCluster", "ServiceMonitor", "PrometheusRule")
ENDING_S = 45
"""How long ending may take during a drain, in seconds: routers 8, the supervisor 5, workers 5,
Redis 5, Ray 10, the stores 3, what is left 2; and some."""
INGRESS = ("--set=ingress.enabled=true", "--set=ingress.host=a.example.com")
BRIEFLY = Retry(ConstantBackoff(0.02), 500)
"""Until a server that starts is there."""
KEY = "--set=auth.keys[0].name=a,auth.keys[0].tenant=default,auth.keys[0].sha256=" + "0" * 64


def each_set(function: Any) -> Any:
    return pytest.mark.parametrize("value_set", VALUE_SETS)(function)


def test_there_are_several_sets_of_values() -> None:
    assert len(VALUE_SETS) >= 4


@each_set
def test_helm_finds_no_fault(value_set: str) -> None:
    done = lint(value_set)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@each_set
def test_kubernetes_takes_every_object(value_set: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in render(value_set):
        if one["kind"] not in NOT_OF_KUBERNETES:
            kubernetes_validate.validate(one, version, strict=True)


def test_kubernetes_refuses_a_misspelt_field() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    spoilt = json.loads(json.dumps(of_kind(render("open-values.yaml"), "StatefulSet")[0]))
    spoilt["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(spoilt, NEWEST, strict=True)


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_kuberay_takes_the_cluster(value_set: str) -> None:
    if not RAY_SCHEMA.is_file():
        pytest.skip(f"there is no {RAY_SCHEMA.name} beside the repository")
    validator = jsonschema.Draft202012Validator(json.loads(RAY_SCHEMA.read_text()))
    (cluster,) = of_kind(render(value_set), "RayCluster")
    assert [error.message for error in validator.iter_errors(cluster)] == []
    cluster = json.loads(json.dumps(cluster))
    cluster["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    assert list(validator.iter_errors(cluster))


@each_set
def test_names_are_unique_and_short(value_set: str) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in render(value_set)]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


@each_set
def test_baton_takes_its_command_lines(value_set: str) -> None:
    """With the parser of the real command line: no flag is made up."""
    seen = []
    for name, container in containers(render(value_set)):
        if not container["image"].split(":")[0].endswith("baton"):
            continue
        command = container.get("command", ENTRYPOINT)
        if command == ENTRYPOINT:
            seen.append(parse(container["args"]).name)
        else:
            assert name == "RayCluster/demo-baton-ray/head/ray-head"
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if hook[:1] == ["baton"]:
            seen.append(parse(hook[1:]).name)
    apart = {"join", "leave", "router"} if value_set in KUBERAY_SETS else set()
    assert set(seen) == {"status", "serve"} | apart


@each_set
def test_baton_reads_its_variables(value_set: str) -> None:
    for _, container in containers(render(value_set)):
        assert unknown_variables([one["name"] for one in container.get("env", ())]) == []


@pytest.mark.parametrize("value_set", ["open-values.yaml", "production-values.yaml"])
def test_the_configuration_is_one_that_baton_takes(
    value_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = render(value_set)
    (cluster,) = of_kind(manifests, "StatefulSet")
    (baton,) = cluster["spec"]["template"]["spec"]["containers"]
    for variable in baton["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "redis://127.0.0.1:1"))
    file = tmp_path / "baton.toml"
    file.write_text(the(manifests, "Secret", "demo-baton")["stringData"]["baton.toml"])
    config = load_config(file)
    assert config.http.endswith(":8000")
    assert config.grpc.endswith(":8001")
    assert config.routers == 2
    if value_set == "production-values.yaml":
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


@pytest.mark.parametrize("value_set", ["production-values.yaml", *KUBERAY_SETS])
def test_the_file_names_are_those_that_the_command_reads(value_set: str) -> None:
    for name, container in containers(render(value_set)):
        if name.endswith(("/baton", "/launcher", "/router")):
            file = Path(parse(container["args"]).parameters["config"])
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert str(file.parent) in mounts
            (pod,) = [pod for owner, pod in pods(render(value_set)) if name.startswith(f"{owner}/")]
            volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
            items = volumes["config"]["secret"]["items"]
            assert items == [{"key": file.name, "path": file.name}]


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_launcher_and_routers_are_of_one_cluster(
    value_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = render(value_set)
    secret = the(manifests, "Secret", "demo-baton")["stringData"]
    file = tmp_path / "baton.toml"
    file.write_text(secret["baton.toml"])
    configs = {}
    for part in ("launcher", "router"):
        deployment = the(manifests, "Deployment", f"demo-baton-{part}")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        with monkeypatch.context() as patch:
            for variable in container["env"]:
                value = variable.get("value", secret.get("redis-url", "redis://h:6379/0"))
                patch.setenv(variable["name"], value)
            configs[part] = load_config(file)
    launcher, router = configs["launcher"], configs["router"]
    assert launcher.ray_address == "demo-baton-ray-head-svc:6379"
    assert launcher.leave_workers
    assert launcher.routers == 0
    assert router.http == "0.0.0.0:8000"
    assert router.grpc == "0.0.0.0:8001"
    for field in ("redis_url", "cluster_id", "model", "pools", "require_key", "keys"):
        assert getattr(launcher, field) == getattr(router, field)
    assert launcher.cluster_id == "demo-baton"
    for pool in launcher.pools:
        assert pool.resources[f"baton_{pool.role}"] == 1
    if value_set == "kuberay-values.yaml":
        assert secret["redis-url"] == launcher.redis_url


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
    changes: tuple[str, ...], told: bool
) -> None:
    all_variables = [
        {variable["name"]: variable.get("value") for variable in container.get("env", ())}
        for _, container in containers(render("open-values.yaml", *changes))
    ]
    (variables,) = [one for one in all_variables if "BATON_HTTP" in one]
    assert (variables.get("BATON_INSECURE_REDIS") == "true") is told


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_the_launcher_has_the_token_that_kuberay_makes(value_set: str) -> None:
    manifests = render(value_set)
    (cluster,) = of_kind(manifests, "RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    launcher = the(manifests, "Deployment", "demo-baton-launcher")
    (container,) = launcher["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    made = {"name": cluster["metadata"]["name"], "key": "auth_token"}
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == made
    # It is KubeRay's to make: the chart has none of that name.
    secrets = [one["metadata"]["name"] for one in of_kind(manifests, "Secret")]
    assert made["name"] not in secrets
    assert launcher["spec"]["strategy"] == {"type": "Recreate"}
    assert launcher["spec"]["replicas"] == 1


def test_a_cluster_without_a_prefill_pool_has_no_pods_for_one() -> None:
    """A pool that starts empty keeps its pods, since it may grow."""

    def groups(*more: str) -> list[str]:
        (cluster,) = of_kind(render("kuberay-values.yaml", *more), "RayCluster")
        return [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]]

    alone = '[{"name": "decode", "role": "decode", "resources": {"baton_decode": 1}}]'
    assert groups() == ["prefill", "decode"]
    assert groups(f"--set-json=config.pools={alone}") == ["decode"]
    assert groups("--set=config.pools[0].count=0") == ["prefill", "decode"]
    own_file = ("--set=existingConfigSecret=a", "--set-json=auth.keys=[]")
    assert groups(*own_file, f"--set-json=config.pools={alone}") == ["prefill", "decode"]


def test_an_empty_pool_needs_no_gpu() -> None:
    empty = (
        "--set=config.pools[0].name=prefill,config.pools[0].role=prefill,config.pools[0].count=0",
        "--set=config.pools[1].name=decode,config.pools[1].role=decode",
        "--set=config.pools[0].resources.GPU=1",
    )
    assert of_kind(render("open-values.yaml", *empty), "StatefulSet")


def test_a_service_may_lead_to_another_release() -> None:
    def leads_to(*more: str) -> Any:
        service = the(render("kuberay-values.yaml", *more), "Service", "demo-baton")
        return service["spec"]["selector"]["app.kubernetes.io/instance"]

    assert leads_to() == "demo"
    assert leads_to("--set=service.release=green") == "green"


@each_set
def test_every_pod_is_held_to_what_it_needs(value_set: str) -> None:
    for name, pod in pods(render(value_set)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
    for name, container in containers(render(value_set)):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["capabilities"] == {"drop": ["ALL"]}, name


@each_set
def test_volumes_are_there_and_used(value_set: str) -> None:
    claimed = {
        claim["metadata"]["name"]
        for one in of_kind(render(value_set), "StatefulSet")
        for claim in one["spec"].get("volumeClaimTemplates", ())
    }
    for name, pod in pods(render(value_set)):
        there = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        mounted = {
            mount["name"]
            for container in pod["spec"]["containers"]
            for mount in container.get("volumeMounts", ())
        }
        assert there <= mounted <= there | claimed, name


@each_set
def test_a_pod_has_time_to_drain(value_set: str) -> None:
    for name, pod in pods(render(value_set)):
        if not name.endswith(("/demo-baton", "/demo-baton-router")):
            continue
        (container,) = pod["spec"]["containers"]
        program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        assert program == "sleep"
        drain_s = 60 if value_set == "production-values.yaml" else 30
        enough = int(seconds) + drain_s + ENDING_S
        assert pod["spec"]["terminationGracePeriodSeconds"] >= enough, name


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
@pytest.mark.parametrize("value_set", ["production-values.yaml", "kuberay-values.yaml"])
def test_helm_test_needs_no_key_where_others_do(value_set: str, status: int, code: int) -> None:
    """What its pod runs, against a front that shows nothing but its health without one."""
    manifests = render(value_set)
    pod = the(manifests, "Pod", "demo-baton-health")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert "env" not in container
    (service,) = (
        f"{one['metadata']['name']}.default.svc:{port['port']}"
        for one in of_kind(manifests, "Service")
        for port in one["spec"]["ports"]
        if one["metadata"]["name"] == "demo-baton" and port["name"] == "http"
    )
    assert service in container["args"]
    with locked_front(status) as front:
        arguments = [front if one == service else one for one in container["args"]]
        done = CliRunner(env={"BATON_API_KEY": None}).invoke(app, arguments)
    assert done.exit_code == code, done.output
    assert "an API key that allows metrics is required" in " ".join(done.output.split())


@each_set
def test_probes_ask_what_a_router_answers(value_set: str) -> None:
    served = (ROOT / "router" / "routes.py").read_text()
    paths = {
        container[probe]["httpGet"]["path"]
        for name, container in containers(render(value_set))
        if name.endswith(("/baton", "/router"))
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {"/live", "/health"}
    for monitor in of_kind(render(value_set), "ServiceMonitor"):
        paths |= {endpoint["path"] for endpoint in monitor["spec"]["endpoints"]}
    assert all(f'("{path}", ' in served for path in paths)


@each_set
def test_selectors_find_one_kind_of_pod(value_set: str) -> None:
    manifests = render(value_set)
    labels = [pod["metadata"].get("labels", {}) for _, pod in pods(manifests)]
    for one in of_kind(manifests, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = one["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        wanted = selector.get("matchLabels", selector)
        found = [own for own in labels if wanted.items() <= own.items()]
        assert found, one["metadata"]["name"]
        components = {own["app.kubernetes.io/component"] for own in found}
        assert len(components) == 1, one["metadata"]["name"]


@each_set
def test_services_lead_to_ports_that_are_there(value_set: str) -> None:
    manifests = render(value_set)
    for service in of_kind(manifests, "Service"):
        wanted = service["spec"]["selector"].items()
        for port in service["spec"]["ports"]:
            for _, pod in pods(manifests):
                if wanted <= pod["metadata"].get("labels", {}).items():
                    names = [one["name"] for one in pod["spec"]["containers"][0]["ports"]]
                    assert port["targetPort"] in names
    backends = {
        (path["backend"]["service"]["name"], path["backend"]["service"]["port"]["name"])
        for ingress in of_kind(manifests, "Ingress")
        for rule in ingress["spec"]["rules"]
        for path in rule["http"]["paths"]
    }
    ports = {port["name"] for port in the(manifests, "Service", "demo-baton")["spec"]["ports"]}
    assert all(name == "demo-baton" and port in ports for name, port in backends)


@each_set
def test_a_monitor_finds_one_service(value_set: str) -> None:
    manifests = render(value_set)
    for monitor in of_kind(manifests, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = of_kind(manifests, "Service")
        found = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        assert [one["metadata"]["name"] for one in found] == ["demo-baton"]
        (endpoint,) = monitor["spec"]["endpoints"]
        (rule,) = endpoint["relabelings"]
        assert rule["targetLabel"] == "job"
        assert rule["replacement"].startswith("baton-")


@each_set
def test_secrets_stay_in_secrets(value_set: str) -> None:
    for one in render(value_set):
        if one["kind"] != "Secret":
            text = json.dumps(one)
            assert "example-index" not in text
            assert "example-gcs" not in text


def test_answers_stream_through_the_ingress() -> None:
    ingress = the(render("production-values.yaml"), "Ingress", "demo-baton")
    notes = ingress["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"
    assert notes[prefix + "proxy-buffering"] == "off"
    assert int(notes[prefix + "proxy-read-timeout"]) > 600
    assert int(notes[prefix + "proxy-send-timeout"]) > 600
    assert notes[prefix + "limit-connections"] == "100"
    paths = [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]]
    assert {listed_scope(path) for path in paths} == {"inference"}
    grpc = the(render("production-values.yaml"), "Ingress", "demo-baton-grpc")
    assert grpc["metadata"]["annotations"][prefix + "backend-protocol"] == "GRPC"
    services = [path["path"].lstrip("/") for path in grpc["spec"]["rules"][0]["http"]["paths"]]
    assert {scope_of_service(one) for one in services} == {"inference", None}


def test_pools_of_kuberay_have_pods_of_their_own() -> None:
    (cluster,) = of_kind(render("kuberay-values.yaml"), "RayCluster")
    spec = cluster["spec"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert set(groups) == {"prefill", "decode"}
    for role, group in groups.items():
        places = group["resources"][WORKER_RESOURCE]
        assert group["resources"][f"baton_{role}"] == places
        (container,) = group["template"]["spec"]["containers"]
        joins = parse(container["args"]).parameters
        # What the pod offers is what Ray's autoscaler knows.
        assert str(joins["workers"]) == places
        assert joins["resource"] == [f"baton_{role}={places}"]
        assert str(joins["gpus"]) == group["rayStartParams"]["num-gpus"]
        assert str(joins["cpus"]) == group["rayStartParams"]["num-cpus"]
        assert joins["address"] == "demo-baton-ray-head-svc:6379"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports[container["readinessProbe"]["tcpSocket"]["port"]] == joins["port"]
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= 30 + LEAVING_S + ENDING_S
    pod = groups["decode"]["template"]["spec"]
    assert pod["nodeSelector"] == {"example.com/accelerator": "h200"}
    assert pod["tolerations"]
    assert pod["topologySpreadConstraints"]
    assert "nodeSelector" not in groups["prefill"]["template"]["spec"]
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == "redis://gcs.example.com:6380"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_ray_takes_its_parameters() -> None:
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    options = (Path(found.origin).parent / "scripts" / "scripts.py").read_text()
    (cluster,) = of_kind(render("kuberay-values.yaml"), "RayCluster")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        assert all(f'"--{name}"' in options for name in group["rayStartParams"])


def test_rays_version_is_the_one_that_is_installed() -> None:
    (cluster,) = of_kind(render("kuberay-values.yaml"), "RayCluster")
    lines = (ROOT / "requirements" / "cuda.lock").read_text().splitlines()
    assert f"ray=={cluster['spec']['rayVersion']} \\" in lines


@pytest.mark.parametrize("store", ["index", "gcs"])
def test_valkey_takes_its_configuration(store: str, tmp_path: Path) -> None:
    secret = the(render("stores-values.yaml"), "Secret", f"demo-baton-{store}")["stringData"]
    file, port = tmp_path / "valkey.conf", free_port()
    file.write_text(secret["valkey.conf"])
    command = [valkey_binary(), str(file), "--bind", "127.0.0.1", "--port", str(port)]
    with (
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server,
        redis.Redis(port=port, password=secret["password"], retry=BRIEFLY) as client,
    ):
        try:
            assert client.ping()
            kept = client.config_get("appendonly")
            assert kept == {"appendonly": "yes" if store == "gcs" else "no"}
        finally:
            server.terminate()
            assert server.wait(20) == 0


def test_the_ingress_knows_routers_by_their_certificates() -> None:
    prefix = "nginx.ingress.kubernetes.io/"
    for name, kind in (("demo-baton", "HTTPS"), ("demo-baton-grpc", "GRPCS")):
        more = (CERTIFICATES, "--set=tls.ingressSecret=ingress")
        notes = the(render("production-values.yaml", *more), "Ingress", name)["metadata"]
        told = {key.removeprefix(prefix): one for key, one in notes["annotations"].items()}
        assert told["backend-protocol"] == kind
        assert told["proxy-ssl-secret"] == "default/ingress"
        assert told["proxy-ssl-verify"] == told["proxy-ssl-server-name"] == "on"
        # A name that `baton certs init` is to be given, as values.yaml says.
        assert told["proxy-ssl-name"] == "demo-baton.default.svc"
        plain = the(render("production-values.yaml", CERTIFICATES), "Ingress", name)["metadata"]
        assert prefix + "proxy-ssl-verify" not in plain["annotations"]


def test_another_configuration_makes_other_pods() -> None:
    def checksum(*more: str) -> str:
        (cluster,) = of_kind(render("open-values.yaml", *more), "StatefulSet")
        return str(cluster["spec"]["template"]["metadata"]["annotations"]["checksum/secret"])

    assert checksum() == checksum()
    assert checksum() != checksum("--set=config.routers=3")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("--set=auth.requireKey=true",), "auth.keys: give at least one"),
        (("--set=existingConfigSecret=a", KEY), "auth.keys and auth.tenants belong"),
        (("--set=config.http=0.0.0.0:1",), "config.http: the chart sets this itself"),
        (("--set=config.gcs_store=embedded",), "config.gcs_store: the chart sets this itself"),
        (("--set=config.model=/models/a",), "give modelVolume"),
        (("--set=redis.mode=external",), "mode external needs url or existingSecret"),
        (("--set=redis.mode=external,redis.existingSecret=a,redis.url=redis://b",), "not both"),
        (("--set=redis.url=redis://a",), "need mode external, but it is embedded"),
        (("--set=redis.mode=external,redis.url=redis://:a@b",), "or set redis.insecure=true"),
        (("--set=gcsStore.mode=external,gcsStore.url=redis://b",), "gcsStore.insecure=true"),
        (("--set=gcsStore.mode=valkey",), "gcsStore.password: mode valkey needs one"),
        (
            (
                "--set=redis.mode=external,redis.url=rediss://:a@b:6379/0",
                "--set=gcsStore.mode=external,gcsStore.url=rediss://:c@b:6379",
            ),
            "a different server than redis.url",
        ),
        (
            ("--set=config.pools[1].resources.GPU=1", "--set=config.pools[1].count=2"),
            "require 2 GPUs",
        ),
        (("--set=ingress.enabled=true",), "ingress.host"),
        ((*INGRESS, "--set=ingress.tlsSecret=a"), "set ingress.insecure=true"),
        ((*INGRESS, "--set=auth.requireKey=true", KEY), "set ingress.insecure=true"),
        (
            ("--set=ingress.grpc.enabled=true", "--set=ingress.grpc.host=a"),
            "ingress.grpc: needs",
        ),
        ((*INGRESS, "--set=ingress.insecure=true"), "networkPolicy.clients: name"),
        (("--set=metrics.serviceMonitor.enabled=true",), "networkPolicy.monitoring: name"),
        (
            ("--set=metrics.serviceMonitor.enabled=true", "--set=auth.requireKey=true", KEY),
            "metrics.serviceMonitor.keySecret: name",
        ),
        (("--set=tls.ingressSecret=a",), "tls.ingressSecret: it needs tls.secret"),
        (("--set=mode=kuberay",), "needs a store that all pods can reach"),
        (("--set=mode=ray",), "mode"),
        (("--set=replicas=two",), "replicas"),
        (("--set=replica=2",), "replica"),
        (("--set=redis.password=a b",), "redis.password"),
        (("--set=env[0].name=BATON_HTTP",), "env.0.name"),
    ],
)
def test_what_would_not_work_is_refused(values: tuple[str, ...], message: str) -> None:
    pools = (
        "--set=config.pools[0].name=prefill,config.pools[0].role=prefill",
        "--set=config.pools[1].name=decode,config.pools[1].role=decode",
    )
    more = pools if any("pools[1]" in value for value in values) else ()
    assert message in refusal("open-values.yaml", *more, *values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("--set=redis.mode=embedded,redis.password=",), "needs a store that all pods can reach"),
        (("--set=gcsStore.mode=none,gcsStore.url=",), "needs one for Ray's head"),
        (("--set=config.ray_address=a:1",), "config.ray_address: the chart sets this itself"),
        (("--set=config.pools[0].resources.baton_prefill=2",), "needs resources.baton_prefill: 1"),
        (("--set=config.pools[0].resources.CPU=1",), "requires CPU"),
        (("--set=config.pools[1].resources.GPU=2",), "require more than its 2"),
        (("--set=config.pools[0].count=9",), "have no room for the 9 workers"),
        (("--set=config.pools[0].cp=4",), "needs 4 in one pod for its ranks"),
        (("--set=kuberay.autoscaling=false",), "1 pods with 1 places have no room"),
    ],
)
def test_kuberay_is_refused_what_it_cannot_have(values: tuple[str, ...], message: str) -> None:
    assert message in refusal("kuberay-values.yaml", *values)


def test_the_rules_are_those_of_the_repository() -> None:
    """Rendered from the very file; without it the chart reports an error."""
    rules = ROOT / "deploy" / "monitoring" / "rules.yaml"
    asked = ("--set=metrics.prometheusRule.enabled=true",)
    if not rules.is_file():
        assert "has no files/rules.yaml" in refusal("open-values.yaml", *asked)
        return
    (rule,) = of_kind(render("open-values.yaml", *asked), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(rules.read_text())


CERTIFICATES = "--set=tls.secret=certs"


@each_set
def test_with_certificates_everything_that_baton_serves_has_them(value_set: str) -> None:
    manifests = render(value_set, CERTIFICATES)
    asked = [probe for _, one in containers(manifests) for probe in _http_probes(one)]
    assert asked
    assert {probe["scheme"] for probe in asked} == {"HTTPS"}
    for owner, pod in pods(manifests):
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            env = {one["name"]: one.get("value") for one in container.get("env", ())}
            mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
            if "BATON_TLS__FOLDER" in env:
                assert mounts["tls"] == env["BATON_TLS__FOLDER"], owner
                assert volumes["tls"]["secret"]["secretName"] == "certs"
    for service in of_kind(manifests, "Service"):
        for port in service["spec"]["ports"]:
            if port["name"] == "http" and "appProtocol" in port:
                assert port["appProtocol"] == "https"


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_workers_pods_have_the_certificates_in_their_configuration(value_set: str) -> None:
    (cluster,) = of_kind(render(value_set, CERTIFICATES), "RayCluster")
    for group in cluster["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert "/etc/baton-tls" in {one["mountPath"] for one in container["volumeMounts"]}


@each_set
def test_missing_certificates_or_keys_are_reported(value_set: str) -> None:
    def has_hint(*more: str) -> bool:
        found = [one for _, one in containers(render(value_set, *more)) if one.get("env")]
        return any(v["name"] == "BATON_INSECURE_LISTEN" for one in found for v in one["env"])

    assert has_hint()
    has_keys = value_set not in ("open-values.yaml", "kuberay-plain-values.yaml")
    assert has_hint(CERTIFICATES) is not has_keys


def _http_probes(container: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    return [container[kind]["httpGet"] for kind in kinds if "httpGet" in container.get(kind, {})]


def test_the_index_s_valkey_knows_each_role_by_its_own_password(tmp_path: Path) -> None:
    manifests = render("stores-values.yaml")
    told = the(manifests, "Secret", "demo-baton")["stringData"]
    file = tmp_path / "valkey.conf"
    file.write_text(the(manifests, "Secret", "demo-baton-index")["stringData"]["valkey.conf"])
    port = free_port()
    bound = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path))
    process = subprocess.Popen([valkey_binary(), str(file), *bound], stdout=subprocess.DEVNULL)
    try:
        for name, user in (
            ("url", "supervisor"),
            ("router-url", "router"),
            ("worker-url", "worker"),
        ):
            url = told[f"redis-{name}"].replace("demo-baton-index:6379", f"127.0.0.1:{port}")
            assert f"//{user}:" in url
            with redis.Redis.from_url(
                url, retry=BRIEFLY, retry_on_error=[redis.ConnectionError]
            ) as client:
                assert client.ping()
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.flushall()
    finally:
        process.kill()
        process.wait(10)
