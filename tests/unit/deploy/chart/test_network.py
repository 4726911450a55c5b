"""Who can reach what: NetworkPolicies, and the paths that an Ingress or a Gateway publishes."""

from __future__ import annotations

from typing import Any

import pytest

from router.access.access import listed_scope, scope_of_service
from tests.support.deploy.chart import (
    CERTIFICATES,
    DISAGGREGATED_SETS,
    KUBERAY_SETS,
    VALUE_SETS,
    Manifest,
    component,
    of_kind,
    pods,
    render,
    the,
)

SETS_WITH_POLICIES = [name for name in VALUE_SETS if name != "kuberay-plain-values.yaml"]
PROMETHEUS = {"kubernetes.io/metadata.name": "monitoring"}
NGINX = "nginx.ingress.kubernetes.io/"


def _matches(selector: Manifest | None, labels: Manifest) -> bool:
    return selector is not None and selector.get("matchLabels", {}).items() <= labels.items()


def _allows(rules: list[Manifest], way: str, labels: Manifest, port: str | int) -> bool:
    """Whether one of a policy's rules has a peer with these labels, of this namespace, and a
    port."""
    for rule in rules:
        peers = rule.get(way)
        if peers is not None and not any(
            "namespaceSelector" not in peer and _matches(peer.get("podSelector"), labels)
            for peer in peers
        ):
            continue
        ports = rule.get("ports")
        if ports is None or any(
            one["port"] == port
            or (isinstance(port, int) and one.get("endPort", 0) >= port >= int(one["port"]))
            for one in ports
        ):
            return True
    return False


def _policies(manifests: tuple[Manifest, ...], labels: Manifest) -> list[Manifest]:
    policies = of_kind(manifests, "NetworkPolicy")
    return [one["spec"] for one in policies if _matches(one["spec"]["podSelector"], labels)]


def connects(
    manifests: tuple[Manifest, ...], start: str, end: str, port: int, group: str = ""
) -> bool:
    """Whether policies let pods of a component connect to a port of those of another one."""
    templates = [pod for _, pod in pods(manifests)]
    (source, *_) = (
        one
        for one in templates
        if component(one) == start and one["metadata"]["labels"].get("baton.io/group", "") == group
    )
    (target, *_) = (one for one in templates if component(one) == end)
    names = {
        one["containerPort"]: one["name"]
        for container in target["spec"]["containers"]
        for one in container.get("ports", ())
    }
    source_labels, target_labels = (one["metadata"]["labels"] for one in (source, target))
    leaving = [
        rule for one in _policies(manifests, source_labels) for rule in one.get("egress", [])
    ]
    entering = [
        rule for one in _policies(manifests, target_labels) for rule in one.get("ingress", [])
    ]
    known = [one for one in (port, names.get(port)) if one is not None]
    leaves = any(_allows(leaving, "to", target_labels, one) for one in known)
    return leaves and any(_allows(entering, "from", source_labels, one) for one in known)


@pytest.mark.parametrize("value_set", SETS_WITH_POLICIES)
def test_each_pod_has_a_policy_in_both_directions(value_set: str) -> None:
    manifests = render(value_set)
    for name, pod in pods(manifests):
        policies = _policies(manifests, pod["metadata"]["labels"])
        # Ray's head has one of its own, too.
        assert len(policies) == 1 + name.endswith("/head"), name
        for policy in policies:
            assert policy["policyTypes"] == ["Ingress", "Egress"], name


def test_connections_of_a_disaggregated_cluster() -> None:
    manifests = render("disaggregated-plain-values.yaml")
    workers, store = 54321, 6379
    allowed = {
        ("router", "worker", workers),
        ("worker", "worker", workers),
        ("router", "index", store),
        ("worker", "index", store),
        ("test", "router", 8002),
    }
    parts = ("router", "worker", "index", "test")
    found = {
        (start, end, port)
        for start in parts
        for end in parts
        for port in (workers, store, 8000, 8001, 8002)
        if connects(manifests, start, end, port)
    }
    # Workers take any free ports, so policies name none of theirs.
    assert {one for one in found if one[1] != "worker" or one[2] == workers} == allowed


def test_connections_of_a_ray_cluster() -> None:
    manifests = render(
        "kuberay-values.yaml", "--set=gcsStore.mode=valkey,gcsStore.url=,gcsStore.password=a"
    )
    ray, store = 9301, 6379
    for end, port, starts in (
        ("ray", ray, {"router", "launcher", "ray/head", "ray/decode"}),
        ("launcher", ray, {"router", "launcher", "ray/head", "ray/decode"}),
        ("index", store, {"router", "launcher", "ray/head", "ray/decode"}),
        ("gcs", store, {"ray/head"}),
        ("router", 8002, {"test"}),
        ("router", 8000, set[str]()),
    ):
        found = {
            start
            for start in ("router", "launcher", "ray/head", "ray/decode", "test", "index")
            if connects(manifests, start.split("/")[0], end, port, "".join(start.split("/")[1:]))
        }
        assert found == starts, end


def test_stores_connect_to_nothing() -> None:
    for value_set in ("stores-values.yaml", "disaggregated-plain-values.yaml"):
        for policy in of_kind(render(value_set), "NetworkPolicy"):
            if policy["metadata"]["name"].endswith(("-index", "-gcs")):
                assert "egress" not in policy["spec"]


@pytest.mark.parametrize("value_set", SETS_WITH_POLICIES)
def test_the_operators_port_is_not_for_clients(value_set: str) -> None:
    manifests = render(value_set)
    front = "router" if value_set in KUBERAY_SETS + DISAGGREGATED_SETS else "cluster"
    policy = the(manifests, "NetworkPolicy", f"demo-baton-{front}")["spec"]
    for rule in policy["ingress"]:
        if {"port": "admin"} in rule["ports"]:
            assert rule["ports"] == [{"port": "admin"}]
            assert {"podSelector": {}} not in rule["from"]
    service = the(manifests, "Service", "demo-baton")["spec"]
    assert {one["name"] for one in service["ports"]} == {"http", "grpc"}


def test_what_leaves_the_namespace_is_what_the_values_name() -> None:
    def egress(*more: str) -> list[Any]:
        policy = the(
            render("disaggregated-values.yaml", *more), "NetworkPolicy", "demo-baton-worker"
        )
        return list(policy["spec"]["egress"])

    https = {"ports": [{"port": 443}]}
    assert https in egress()
    assert https not in egress("--set=networkPolicy.modelDownload=false")
    collector = {
        "to": [{"namespaceSelector": {"matchLabels": PROMETHEUS}}],
        "ports": [{"port": 4317}],
    }
    assert collector in egress()
    own = '[{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]'
    added = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    assert added in egress(f"--set-json=networkPolicy.egress={own}")


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_an_ingress_leads_to_the_api_alone(value_set: str) -> None:
    manifests = render(value_set)
    backends = {
        (path["backend"]["service"]["name"], path["backend"]["service"]["port"]["name"])
        for ingress in of_kind(manifests, "Ingress")
        for rule in ingress["spec"]["rules"]
        for path in rule["http"]["paths"]
    }
    assert backends <= {("demo-baton", "http"), ("demo-baton", "grpc")}


def test_answers_stream_through_the_ingress() -> None:
    ingress = the(render("standalone-values.yaml"), "Ingress", "demo-baton")
    notes = ingress["metadata"]["annotations"]
    assert notes[NGINX + "proxy-buffering"] == "off"
    assert int(notes[NGINX + "proxy-read-timeout"]) > 600
    assert int(notes[NGINX + "proxy-send-timeout"]) > 600
    assert notes[NGINX + "limit-connections"] == "100"
    paths = [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]]
    assert {listed_scope(path) for path in paths} == {"inference"}
    grpc = the(render("standalone-values.yaml"), "Ingress", "demo-baton-grpc")
    assert grpc["metadata"]["annotations"][NGINX + "backend-protocol"] == "GRPC"
    services = [path["path"].lstrip("/") for path in grpc["spec"]["rules"][0]["http"]["paths"]]
    assert {scope_of_service(one) for one in services} == {"inference", None}


def test_other_ingress_classes_get_their_own_annotations_alone() -> None:
    for ingress in of_kind(
        render("standalone-values.yaml", "--set=ingress.className=traefik"), "Ingress"
    ):
        assert ingress["spec"]["ingressClassName"] == "traefik"
        notes = ingress["metadata"]["annotations"] or {}
        assert set(notes) <= {NGINX + "limit-connections"}, "those of the values"


def test_the_ingress_knows_routers_by_their_certificates() -> None:
    for name, kind in (("demo-baton", "HTTPS"), ("demo-baton-grpc", "GRPCS")):
        more = (CERTIFICATES, "--set=tls.ingressSecret=ingress")
        notes = the(render("standalone-values.yaml", *more), "Ingress", name)["metadata"]
        told = {key.removeprefix(NGINX): one for key, one in notes["annotations"].items()}
        assert told["backend-protocol"] == kind
        assert told["proxy-ssl-secret"] == "default/ingress"
        assert told["proxy-ssl-verify"] == told["proxy-ssl-server-name"] == "on"
        # A name that `baton certs init` is to be given, as values.yaml says.
        assert told["proxy-ssl-name"] == "demo-baton.default.svc"
        plain = the(render("standalone-values.yaml", CERTIFICATES), "Ingress", name)["metadata"]
        assert NGINX + "proxy-ssl-verify" not in plain["annotations"]


def test_routes_of_a_gateway_publish_inference_alone() -> None:
    manifests = render("disaggregated-values.yaml")
    (http,) = of_kind(manifests, "HTTPRoute")
    (grpc,) = of_kind(manifests, "GRPCRoute")
    assert http["spec"]["hostnames"] == ["llm.example.com"]
    assert grpc["spec"]["hostnames"] == ["grpc.llm.example.com"]
    ports = {
        one["port"]: one["name"] for one in the(manifests, "Service", "demo-baton")["spec"]["ports"]
    }
    paths, services = [], []
    for route, port in ((http, "http"), (grpc, "grpc")):
        assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
        for rule in route["spec"]["rules"]:
            (backend,) = rule["backendRefs"]
            assert backend["name"] == "demo-baton"
            assert ports[backend["port"]] == port
            # The bound of the older versions of the API.
            assert 1 <= len(rule["matches"]) <= 8
            for match in rule["matches"]:
                if port == "http":
                    paths.append(match["path"]["value"])
                    assert int(rule["timeouts"]["request"].removesuffix("s")) > 600
                else:
                    services.append(match["method"]["service"])
    assert {listed_scope(path) for path in paths} == {"inference"}
    assert "/v1/chat/completions" in paths
    assert {scope_of_service(one) for one in services} == {"inference", None}
    # The same as an Ingress publishes.
    ingress = the(render("standalone-values.yaml"), "Ingress", "demo-baton")
    assert paths == [one["path"] for one in ingress["spec"]["rules"][0]["http"]["paths"]]


def test_a_gateway_checks_the_pods_certificates() -> None:
    manifests = render("disaggregated-values.yaml")
    (policy,) = of_kind(manifests, "BackendTLSPolicy")
    (target,) = policy["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == ("Service", "demo-baton")
    validation = policy["spec"]["validation"]
    assert validation["caCertificateRefs"][0]["name"] == "baton-ca"
    certificate = the(manifests, "Certificate", "demo-baton-router")
    assert validation["hostname"] in certificate["spec"]["dnsNames"]
    plain = render(
        "disaggregated-values.yaml",
        "--set=tls.certManager.enabled=false,tls.insecure=true",
        "--set=clusterSecret.existingSecret=a",
    )
    assert not of_kind(plain, "BackendTLSPolicy")
    assert of_kind(plain, "HTTPRoute")


def test_only_ray_s_head_calls_kubernetes() -> None:
    for group, calls in (("head", True), ("decode", False)):
        (pod, *_) = (
            pod
            for _, pod in pods(
                render("kuberay-values.yaml", "--set=networkPolicy.modelDownload=false")
            )
            if pod["metadata"]["labels"].get("baton.io/group") == group
        )
        policies = _policies(
            render("kuberay-values.yaml", "--set=networkPolicy.modelDownload=false"),
            pod["metadata"]["labels"],
        )
        found = [rule for one in policies for rule in one["egress"]]
        assert ({"ports": [{"port": 443}, {"port": 6443}]} in found) is calls
