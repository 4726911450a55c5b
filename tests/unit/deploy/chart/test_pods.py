"""Pods have what they need and no more: privileges, resources, probes, volumes and time to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.launcher.node_agent import ENDING_S as LEAVING_S
from deploy.workers.worker_actor import END_S
from tests.support.deploy.chart import (
    CERTIFICATES,
    DISAGGREGATED_SETS,
    KUBERAY_SETS,
    VALUE_SETS,
    component,
    containers,
    of_kind,
    pods,
    render,
    the,
)

ROOT = Path(__file__).parents[4]
ENDING_S = 45
"""How long ending may take during a drain, in seconds: routers 8, the supervisor 5, workers 5,
Redis 5, Ray 10, the stores 3, what is left 2; and some."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
each_set = pytest.mark.parametrize("value_set", VALUE_SETS)


def _http_probes(container: dict[str, Any]) -> list[dict[str, Any]]:
    return [container[kind]["httpGet"] for kind in PROBES if "httpGet" in container.get(kind, {})]


@each_set
def test_every_pod_has_only_the_privileges_that_it_needs(value_set: str) -> None:
    for name, pod in pods(render(value_set)):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert "hostNetwork" not in spec, name
        assert "hostPID" not in spec, name
        # Ray's autoscaler next to the head is the only one that calls Kubernetes.
        scales = value_set == "kuberay-values.yaml" and name.endswith("/head")
        assert spec.get("automountServiceAccountToken", True) is scales, name
    for name, container in containers(render(value_set)):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["capabilities"]["drop"] == ["ALL"], name
        rdma = value_set == "disaggregated-values.yaml" and name.endswith("/worker")
        assert context["capabilities"].get("add", []) == (["IPC_LOCK"] if rdma else []), name


@each_set
def test_every_container_says_what_it_uses(value_set: str) -> None:
    for name, container in containers(render(value_set)):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), name
        assert "memory" in resources["limits"], name
        _, colon, tag = container["image"].rpartition(":")
        assert colon, name
        assert tag not in ("", "latest"), name


@each_set
def test_routers_have_an_image_without_torch(value_set: str) -> None:
    """And so has the pod that asks one; every other pod of Baton's has the whole."""
    found = dict(containers(render(value_set)))
    lean = {name for name in found if name.endswith("/router")}
    if lean:
        lean |= {name for name in found if name.endswith("/health")}
    assert {name for name, one in found.items() if one["image"].endswith("-router")} == lean


@each_set
def test_every_container_that_serves_has_probes(value_set: str) -> None:
    # What runs once needs none, and a launcher has no listener.
    without = ("/health", "/pull-model", "/ray-certificate", "/launcher")
    for name, container in containers(render(value_set)):
        if not name.endswith(without):
            assert {"readinessProbe", "livenessProbe"} <= container.keys(), name
        if name.endswith(("/baton", "/router", "/worker")):
            assert "startupProbe" in container, name


@each_set
def test_probes_ask_what_is_answered(value_set: str) -> None:
    served = (ROOT / "router" / "routes.py").read_text()
    for name, container in containers(render(value_set)):
        paths = [probe["path"] for probe in _http_probes(container)]
        if name.endswith(("/baton", "/router")):
            assert paths == ["/live", "/health", "/live"]
            assert all(f'("{path}", ' in served for path in paths)
        elif name.endswith("/worker"):
            assert paths == ["/ready", "/ready", "/live"]
        else:
            assert paths == []
        ports = {one["name"] for one in container.get("ports", ())}
        assert {probe["port"] for probe in _http_probes(container)} <= ports


@each_set
def test_with_certificates_listeners_of_routers_are_asked_by_tls(value_set: str) -> None:
    """A worker's probes have no TLS, since a kubelet has no certificate."""
    for name, container in containers(render(value_set, CERTIFICATES)):
        schemes = {probe.get("scheme", "HTTP") for probe in _http_probes(container)}
        if schemes:
            assert schemes == {"HTTP" if name.endswith("/worker") else "HTTPS"}


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
            for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
            for mount in container.get("volumeMounts", ())
        }
        assert there <= mounted <= there | claimed, name
        for container in pod["spec"].get("initContainers", ()):
            assert {mount["name"] for mount in container["volumeMounts"]} <= there, name


@each_set
def test_a_pod_has_time_to_drain(value_set: str) -> None:
    drain_s = 60 if value_set in ("standalone-values.yaml", "disaggregated-values.yaml") else 30
    for name, pod in pods(render(value_set)):
        grace_s = pod["spec"].get("terminationGracePeriodSeconds")
        (container, *_) = pod["spec"]["containers"]
        if component(pod) in ("cluster", "router"):
            program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
            assert program == "sleep"
            assert grace_s >= int(seconds) + drain_s + ENDING_S, name
        elif component(pod) == "worker":
            # SIGTERM itself drains.
            assert "lifecycle" not in container
            assert grace_s >= drain_s + END_S, name
        elif component(pod) == "ray":
            assert grace_s >= drain_s + LEAVING_S + ENDING_S, name


@pytest.mark.parametrize("value_set", KUBERAY_SETS + DISAGGREGATED_SETS)
def test_pods_of_a_lost_node_are_soon_replaced(value_set: str) -> None:
    for name, pod in pods(render(value_set)):
        if component(pod) not in ("index", "gcs"):
            waits = {
                one["key"]: one["tolerationSeconds"]
                for one in pod["spec"]["tolerations"]
                if one["effect"] == "NoExecute"
            }
            assert waits == {
                "node.kubernetes.io/not-ready": 30,
                "node.kubernetes.io/unreachable": 30,
            }, name
        assert "StatefulSet" not in name or component(pod) in ("index", "gcs")


@pytest.mark.parametrize("value_set", KUBERAY_SETS + DISAGGREGATED_SETS)
def test_routers_are_spread_over_hosts(value_set: str) -> None:
    template = the(render(value_set), "Deployment", "demo-baton-router")["spec"]["template"]
    (spread,) = template["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    wanted = spread["labelSelector"]["matchLabels"]
    assert wanted.items() <= template["metadata"]["labels"].items()


def test_another_configuration_makes_other_pods() -> None:
    def checksums(value_set: str, *more: str) -> dict[str, str]:
        return {
            name: pod["metadata"]["annotations"]["checksum/secret"]
            for name, pod in pods(render(value_set, *more))
            if "checksum/secret" in pod["metadata"].get("annotations", {})
        }

    assert checksums("open-values.yaml") == checksums("open-values.yaml")
    for change in ("config.slo_ttft_s=3", "redis.mode=external,redis.url=rediss://a"):
        assert checksums("open-values.yaml") != checksums("open-values.yaml", f"--set={change}")

    def changed(*more: str) -> set[str]:
        """The pods that another value replaces."""
        before = checksums("disaggregated-plain-values.yaml")
        after = checksums("disaggregated-plain-values.yaml", *more)
        return {name.rpartition("-")[2] for name in before if before[name] != after[name]}

    assert changed("--set=config.kv_host_mib=1") == {"prefill", "decode", "router"}
    # What workers do not read does not replace them.
    for routers_only in (
        "workers.decode.replicas=3",
        "config.allowed_origins[0]=https://a.example.com",
        "config.max_waiting_requests=9",
        "auth.tenants[0].name=acme",
    ):
        assert changed(f"--set={routers_only}") == {"router"}


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_a_new_version_of_the_chart_alone_replaces_no_pods(value_set: str) -> None:
    for _, pod in pods(render(value_set)):
        if component(pod) not in ("index", "gcs"):
            assert "helm.sh/chart" not in pod["metadata"]["labels"]
