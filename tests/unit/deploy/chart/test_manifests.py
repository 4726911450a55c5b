"""What the chart renders from each set of values is valid, and its parts fit each other."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.deploy.chart import (
    CERTIFICATES,
    CHART,
    KUBERAY_SETS,
    MODES,
    VALUE_SETS,
    helm,
    lint,
    of_kind,
    pods,
    render,
    the,
)

ROOT = Path(__file__).parents[4]
RAY_SCHEMA = ROOT.parent / "shared" / "schemas" / "raycluster-ray-v1.json"
OLDEST, NEWEST = "1.27", "1.37"
"""Of Kubernetes: what Chart.yaml asks for at least, and what the schemas that tests have know."""
OF_KUBERNETES = ("v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1")
OTHERS = {
    "ray.io/v1": {"RayCluster"},
    "monitoring.coreos.com/v1": {"ServiceMonitor", "PodMonitor", "PrometheusRule"},
    "monitoring.coreos.com/v1alpha1": {"ScrapeConfig"},
    "cert-manager.io/v1": {"Certificate", "Issuer"},
    "gateway.networking.k8s.io/v1": {"HTTPRoute", "GRPCRoute", "BackendTLSPolicy"},
    "keda.sh/v1alpha1": {"ScaledObject"},
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet"},
}
"""Kinds of other projects, by their API. RayCluster and LeaderWorkerSet have schemas
(``test_groups.py``)."""
each_set = pytest.mark.parametrize("value_set", VALUE_SETS)


def test_each_mode_has_sets_of_values() -> None:
    modes = [
        "kuberay"
        if of_kind(render(name), "RayCluster")
        else "standalone"
        if of_kind(render(name), "StatefulSet")[0]["metadata"]["name"] == "demo-baton"
        else "disaggregated"
        for name in VALUE_SETS
        if of_kind(render(name), "RayCluster", "StatefulSet")
    ]
    assert set(modes) == set(MODES)


@each_set
def test_helm_finds_no_fault(value_set: str) -> None:
    done = lint(value_set)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@each_set
def test_kubernetes_takes_every_object(value_set: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in render(value_set):
        if one["apiVersion"] in OF_KUBERNETES:
            kubernetes_validate.validate(one, version, strict=True)
        else:
            assert one["kind"] in OTHERS[one["apiVersion"]]


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
def test_secrets_stay_in_secrets(value_set: str) -> None:
    for one in render(value_set):
        if one["kind"] != "Secret":
            text = json.dumps(one)
            assert "example-index" not in text
            assert "example-gcs" not in text


@each_set
def test_selectors_find_one_kind_of_pod(value_set: str) -> None:
    manifests = render(value_set)
    labels = [pod["metadata"].get("labels", {}) for _, pod in pods(manifests)]
    for one in of_kind(manifests, "Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment"):
        spec = one["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        wanted = selector.get("matchLabels", selector)
        found = [own for own in labels if wanted.items() <= own.items()]
        assert found, one["metadata"]["name"]
        components = {own["app.kubernetes.io/component"] for own in found}
        assert len(components) == 1, one["metadata"]["name"]
        if one["kind"] == "Deployment":
            assert len(found) == 1, one["metadata"]["name"]


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


@each_set
def test_with_certificates_services_are_marked_so(value_set: str) -> None:
    for service in of_kind(render(value_set, CERTIFICATES), "Service"):
        for port in service["spec"]["ports"]:
            if port["name"] in ("http", "admin") and "appProtocol" in port:
                assert port["appProtocol"] == "https"


def test_a_service_may_lead_to_another_release() -> None:
    def leads_to(*more: str) -> Any:
        service = the(render("kuberay-values.yaml", *more), "Service", "demo-baton")
        return service["spec"]["selector"]["app.kubernetes.io/instance"]

    assert leads_to() == "demo"
    assert leads_to("--set=service.release=green") == "green"


def test_the_script_for_a_cluster_in_containers_installs_what_renders() -> None:
    """The script itself was not run: it needs docker. Its sets of values are read from it."""
    script = (ROOT / "tools" / "kind_test.sh").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
    shared = [one.rstrip(")") for one in re.findall(r"CERTIFICATES=\((.*)\)", script)]
    installs = re.findall(r"^install \w+ (\S+) ((?:.*\\\n)?.*)", script, re.MULTILINE)
    assert [name for name, _ in installs] == [
        "disaggregated-plain-values.yaml",
        "kuberay-plain-values.yaml",
    ]
    for name, more in installs:
        words = shlex.split(
            " ".join((*shared, more.replace('"${CERTIFICATES[@]}"', "").replace("\\\n", " ")))
        )
        assert of_kind(render(name, *words), "Certificate")


@pytest.mark.parametrize(
    ("value_set", "more", "expected", "absent"),
    [
        ("open-values.yaml", (), ["for demonstrations", "There are no API keys"], ["revision"]),
        (
            "disaggregated-values.yaml",
            (),
            ["kubectl --namespace default scale deployment/demo-baton-decode", "llm.example.com"],
            ["revision", "no API keys", "no certificates"],
        ),
        (
            "disaggregated-values.yaml",
            ("--set=config.revision=",),
            ["config.revision is not set", "newer files of example/llama"],
            [],
        ),
        ("kuberay-plain-values.yaml", (), ["two launchers", "There are no certificates"], []),
    ],
)
def test_the_notes_list_what_is_left_to_do(
    value_set: str, more: tuple[str, ...], expected: list[str], absent: list[str], tmp_path: Path
) -> None:
    """`helm template` shows no notes, so a copy of the chart has them as an object."""
    chart = tmp_path / "baton"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / "NOTES.txt").read_text()
    shown = '{{ define "notes" }}' + notes + '{{ end }}\nnotes: {{ include "notes" . | quote }}\n'
    (chart / "templates" / "notes.yaml").write_text(shown)
    values = ("--values", str(CHART / "ci" / value_set), "--kube-version", "1.30.0")
    done = helm(
        "template", "demo", str(chart), *values, *more, "--show-only", "templates/notes.yaml"
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(yaml.safe_load(done.stdout)["notes"].split())
    assert [one for one in expected if one not in text] == []
    assert [one for one in absent if one in text] == []
