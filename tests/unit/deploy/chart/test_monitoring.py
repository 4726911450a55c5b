"""Prometheus finds every process of each mode, and gets Baton's rules and dashboards."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config.cluster import Config
from tests.support.deploy import watched
from tests.support.deploy.chart import (
    CERTIFICATES,
    KUBERAY_SETS,
    VALUE_SETS,
    component,
    of_kind,
    pods,
    render,
    the,
)
from tools.reference.metrics import families

ROOT = Path(__file__).parents[4]
ASKED = (
    "--set=metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.keySecret.name=prometheus",
    "--set-json=networkPolicy.monitoring="
    '[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"monitoring"}}}]',
)
PARTS = {
    "standalone": {"baton-cluster"},
    "disaggregated": {"baton-router", "baton-worker"},
    "kuberay": {"baton-router", "baton-worker", "baton-supervisor"},
}
"""Jobs of each mode. A page of a whole cluster has all of its parts; without a launcher there is no
supervisor."""
KINDS = ("ServiceMonitor", "PodMonitor", "ScrapeConfig")


def _mode(value_set: str) -> str:
    first = value_set.partition("-")[0]
    return first if first in PARTS else "standalone"


def _endpoint(monitor: dict[str, Any]) -> dict[str, Any]:
    spec = monitor["spec"]
    (found,) = spec.get("endpoints") or spec.get("podMetricsEndpoints") or [spec]
    return dict(found)


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_every_part_is_scraped(value_set: str) -> None:
    manifests = render(value_set, *ASKED)
    served = (ROOT / "router" / "routes.py").read_text()
    jobs = set()
    for monitor in of_kind(manifests, *KINDS):
        endpoint = _endpoint(monitor)
        assert f'("{endpoint.get("path") or endpoint["metricsPath"]}", ' in served
        jobs |= {
            one["replacement"] for one in endpoint["relabelings"] if one.get("targetLabel") == "job"
        }
        if monitor["kind"] == "ServiceMonitor":
            wanted = monitor["spec"]["selector"]["matchLabels"].items()
            services = of_kind(manifests, "Service")
            (service,) = [one for one in services if wanted <= one["metadata"]["labels"].items()]
            assert service["metadata"]["name"] == "demo-baton-admin"
            assert endpoint["port"] in {one["name"] for one in service["spec"]["ports"]}
        elif monitor["kind"] == "PodMonitor":
            wanted = monitor["spec"]["selector"]["matchLabels"].items()
            found = [
                pod for _, pod in pods(manifests) if wanted <= pod["metadata"]["labels"].items()
            ]
            assert {component(pod) for pod in found} == {"worker"}
            for pod in found:
                names = {one["name"] for one in pod["spec"]["containers"][0]["ports"]}
                # Of a worker in several pods, that of rank 0 has the page.
                ranks_alone = pod in [one for name, one in pods(manifests) if "/worker" in name]
                assert (endpoint["port"] in names) is not ranks_alone
        else:
            (discovery,) = monitor["spec"]["httpSDConfigs"]
            service, _, path = discovery["url"].partition("://")[2].partition("/")
            assert service == "demo-baton-admin.default.svc:8002"
            assert f'("/{path}", ' in served
            assert discovery["authorization"]["credentials"]["name"] == "prometheus"
    assert jobs == PARTS[_mode(value_set)]


WITHOUT_SUPERVISOR = {"BatonWorkerNotRunning", "BatonWorkerKeepsDying", "BatonAutoscalerStuck"}
"""Alerts of what Kubernetes does in mode disaggregated, and tells by its own metrics."""


@pytest.mark.parametrize("mode", sorted(PARTS))
def test_every_series_of_a_rule_has_a_scrape_path(mode: str) -> None:
    """``test_every_part_is_scraped`` shows that the parts of a mode are scraped."""
    pages: dict[str, set[str]] = {}
    for one in families():
        pages.setdefault(one.name, set()).add(one.page)
    own = {job.removeprefix("baton-") for job in PARTS[mode]}
    scraped = {"router", "worker", "supervisor"} if own == {"cluster"} else own
    missing: set[str] = set()
    for rule in watched.rules():
        for name in re.findall(r"\bbaton_[a-z0-9_]+", rule["expr"]):
            family = re.sub("_(total|bucket|sum|count)$", "", name)
            if not pages.get(family, scraped) & scraped:
                missing.add(str(rule.get("alert")))
    assert missing == (WITHOUT_SUPERVISOR if mode == "disaggregated" else set())


@pytest.mark.parametrize("value_set", [one for one in VALUE_SETS if one not in KUBERAY_SETS[:1]])
def test_policies_let_prometheus_in(value_set: str) -> None:
    policies = {
        one["metadata"]["name"].removeprefix("demo-baton-"): one["spec"]["ingress"]
        for one in of_kind(render(value_set, *ASKED), "NetworkPolicy")
        if "ingress" in one["spec"]
    }
    entries = {
        (part, port["port"])
        for part, rules in policies.items()
        for rule in rules
        if any("namespaceSelector" in peer for peer in rule["from"])
        for port in rule.get("ports", ())
        if port["port"] not in ("http", "grpc")
    }
    expected: dict[str, set[tuple[str, str | int]]] = {
        "standalone": {("cluster", "admin")},
        "disaggregated": {("router", "admin"), ("worker", 9401)},
        "kuberay": {("router", "admin"), ("ray", 9401), ("launcher", "metrics")},
    }
    assert entries == expected[_mode(value_set)]
    ports = Config(metrics_port=9400).worker_metrics_ports
    for rules in policies.values():
        for rule in rules:
            for port in rule.get("ports", ()):
                if "endPort" in port:
                    assert range(port["port"], port["endPort"] + 1) == ports


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_prometheus_shows_certificates_where_they_are_asked_for(value_set: str) -> None:
    for monitor in of_kind(render(value_set, *ASKED, CERTIFICATES), *KINDS):
        endpoint = _endpoint(monitor)
        assert endpoint["scheme"].lower() == "https"
        tls = endpoint["tlsConfig"]
        assert tls["ca"]["secret"] == {"name": "certs", "key": "ca.pem"}
        part = tls["serverName"].partition(".")[0]
        if monitor["kind"] == "ServiceMonitor":
            assert part == "router"
            assert "cert" not in tls
        else:
            assert part in ("worker", "supervisor")
            assert tls["cert"]["secret"] == {"name": "certs", "key": "monitor.pem"}
            assert tls["keySecret"] == {"name": "certs", "key": "monitor.key"}


def test_a_part_s_scrape_keeps_its_own_targets() -> None:
    for monitor in of_kind(render("kuberay-values.yaml"), "ScrapeConfig"):
        kept, named = monitor["spec"]["relabelings"]
        assert kept["sourceLabels"] == ["part"]
        assert named["replacement"] == f"baton-{kept['regex']}"
        assert monitor["spec"]["tlsConfig"]["serverName"].startswith(kept["regex"])


def test_the_rules_are_those_of_the_repository() -> None:
    (rule,) = of_kind(
        render("open-values.yaml", "--set=metrics.prometheusRule.enabled=true"), "PrometheusRule"
    )
    rules = ROOT / "deploy" / "monitoring" / "rules.yaml"
    assert rule["spec"] == yaml.safe_load(rules.read_text())


def test_the_dashboards_are_those_of_the_repository() -> None:
    found = {
        name: json.loads(text)
        for one in of_kind(render("disaggregated-values.yaml"), "ConfigMap")
        for name, text in one["data"].items()
        if one["metadata"]["labels"]["grafana_dashboard"] == "1"
    }
    folder = ROOT / "deploy" / "monitoring" / "dashboards"
    assert found == {
        f"baton-{path.name}": json.loads(path.read_text()) for path in folder.glob("*.json")
    }
    assert not of_kind(render("open-values.yaml"), "ConfigMap")


def test_autoscalers_ask_for_needed_workers() -> None:
    manifests = render("disaggregated-values.yaml")
    (scaled,) = of_kind(manifests, "ScaledObject")
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "demo-baton-prefill"}
    assert scaled["spec"]["scaleTargetRef"] == target
    (trigger,) = scaled["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    metric = "baton_needed_workers"
    assert query == f'max({metric}{{cluster="llama",role="prefill"}})'
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    hpa = the(manifests, "HorizontalPodAutoscaler", "demo-baton-decode")["spec"]
    assert hpa["scaleTargetRef"]["name"] == "demo-baton-decode"
    (wanted,) = hpa["metrics"]
    assert wanted["external"]["metric"] == {
        "name": metric,
        "selector": {"matchLabels": {"cluster": "llama", "role": "decode"}},
    }
    # One pod for each.
    assert wanted["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    for name in ("prefill", "decode"):
        assert "replicas" not in the(manifests, "Deployment", f"demo-baton-{name}")["spec"]
