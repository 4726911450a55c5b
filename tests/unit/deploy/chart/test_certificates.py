"""Each pod has the certificate of its own role alone, and the secrets of its own role alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.security.tls import ROLES, PeerRole, TlsFiles, role_name
from deploy.certificates import init
from tests.support.deploy.chart import (
    CERTIFICATES,
    DISAGGREGATED_SETS,
    KUBERAY_SETS,
    VALUE_SETS,
    Manifest,
    component,
    containers,
    environment,
    of_kind,
    pods,
    render,
    the,
)

CERT_MANAGER = "--set=tls.secret=,tls.certManager.enabled=true"
OWN: dict[str, set[PeerRole]] = {
    "cluster": {"router", "worker", "supervisor"},
    "router": {"router"},
    "worker": {"worker"},
    "launcher": {"supervisor"},
    "ray": {"worker"},
    "test": set(),
}
"""Roles whose keys the pods of a component have. Ray's head has none."""


def _items(pod: Manifest) -> list[tuple[str, str, str]]:
    """Secret, key and file of what a pod's folder of certificates holds."""
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    if "tls" not in volumes:
        return []
    return [
        (source["secret"]["name"], item["key"], item["path"])
        for source in volumes["tls"]["projected"]["sources"]
        for item in source["secret"]["items"]
    ]


@pytest.mark.parametrize("made", [CERTIFICATES, CERT_MANAGER])
@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_a_pod_has_the_key_of_its_own_role(value_set: str, made: str, tmp_path: Path) -> None:
    init(tmp_path)
    for name, pod in pods(render(value_set, made)):
        if component(pod) not in OWN:
            assert _items(pod) == []
            continue
        roles = set() if name.endswith("/head") else OWN[component(pod)]
        files = {path for _, _, path in _items(pod)}
        assert {file.removesuffix(".key") for file in files if file.endswith(".key")} == roles
        # The names that Baton looks for in the folder.
        wanted = {path.name for role in roles for path in TlsFiles.in_folder(tmp_path, role).paths}
        assert files == wanted | {"ca.pem"}, name
        assert all((tmp_path / file).is_file() for file in files)
        for container in pod["spec"]["containers"]:
            env = {one["name"]: one.get("value") for one in container.get("env", ())}
            mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
            assert mounts["tls"] == env.get("BATON_TLS__FOLDER", "/etc/baton-tls"), name


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_certificates_of_cert_manager(value_set: str) -> None:
    manifests = render(value_set, CERT_MANAGER)
    certificates = {
        one["spec"]["secretName"]: one["spec"] for one in of_kind(manifests, "Certificate")
    }
    issuers = {one["metadata"]["name"]: one["spec"] for one in of_kind(manifests, "Issuer")}
    used = {secret for _, pod in pods(manifests) for secret, _, _ in _items(pod)}
    # That of Ray's own connections has no role of Baton (``test_kuberay.py``).
    certificates.pop("demo-baton-ray-launcher-ca", None)
    # Prometheus has that of the role monitor.
    assert used | {"demo-baton-monitor-tls", "demo-baton-ca"} == certificates.keys()
    authority = certificates.pop("demo-baton-ca")
    assert authority["isCA"]
    assert issuers == {
        authority["issuerRef"]["name"]: {"selfSigned": {}},
        "demo-baton-ca": {"ca": {"secretName": "demo-baton-ca"}},
    }
    for secret, spec in certificates.items():
        role: Any = secret.removeprefix("demo-baton-").removesuffix("-tls")
        assert role in ROLES
        assert spec["dnsNames"][0] == role_name(role)
        assert not any(role_name(other) in spec["dnsNames"] for other in ROLES if other != role)
        assert "client auth" in spec["usages"]
        assert ("server auth" in spec["usages"]) is (role != "monitor")
        assert spec["issuerRef"] == {
            "name": "demo-baton-ca",
            "kind": "Issuer",
            "group": "cert-manager.io",
        }
    names = certificates["demo-baton-router-tls"]["dnsNames"]
    for service in ("demo-baton", "demo-baton-admin"):
        assert f"{service}.default.svc" in names


def test_an_issuer_of_the_operator() -> None:
    manifests = render(
        "disaggregated-values.yaml",
        "--set=tls.certManager.issuerRef.name=vault,tls.certManager.issuerRef.kind=ClusterIssuer",
    )
    assert not of_kind(manifests, "Issuer")
    for one in of_kind(manifests, "Certificate"):
        assert one["spec"]["issuerRef"] == {"name": "vault", "kind": "ClusterIssuer"}
    assert (
        "llm.example.com" in the(manifests, "Certificate", "demo-baton-router")["spec"]["dnsNames"]
    )


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_missing_certificates_or_keys_are_reported(value_set: str) -> None:
    def told(*more: str) -> set[str]:
        return {
            name.rpartition("/")[2]
            for name, one in containers(render(value_set, *more))
            if any(v["name"] == "BATON_INSECURE_LISTEN" for v in one.get("env", ()))
        }

    without = (
        "--set=tls.secret=,tls.certManager.enabled=false,tls.insecure=true",
        "--set=clusterSecret.existingSecret=a",
    )
    parts = {"router", "worker"} if value_set in DISAGGREGATED_SETS else {"baton"}
    if value_set in KUBERAY_SETS:
        parts = {"router", "launcher"}
    assert told(*without) == parts
    has_keys = not value_set.endswith(("open-values.yaml", "plain-values.yaml"))
    assert told(CERTIFICATES) == (set() if has_keys else parts & {"router", "baton"})


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_addresses_of_the_store_are_those_of_the_pod_s_role(value_set: str) -> None:
    manifests = render(value_set)
    for name, container in containers(manifests):
        env = environment(container, manifests)
        urls = {key: one for key, one in env.items() if key.startswith("BATON_REDIS_")}
        part = name.rpartition("/")[2]
        if part in ("router", "worker"):
            assert urls.keys() == {"BATON_REDIS_URL"}, name
            secret = next(
                one["valueFrom"]["secretKeyRef"]
                for one in container["env"]
                if one["name"] == "BATON_REDIS_URL"
            )
            if value_set == "disaggregated-values.yaml":
                assert secret == {"name": "baton-redis", "key": f"{part}-url"}
            elif value_set == "disaggregated-plain-values.yaml" or part in urls:
                assert urls["BATON_REDIS_URL"].startswith(f"redis://{part}@")
        elif part not in ("baton", "launcher"):
            assert not urls, name


@pytest.mark.parametrize("part", ["router", "worker"])
def test_a_pod_s_secret_has_no_address_of_other_roles(part: str) -> None:
    secret = the(render("disaggregated-plain-values.yaml"), "Secret", f"demo-baton-{part}")
    told = secret["stringData"]
    assert told.keys() == {"baton.toml", "redis-url", "cluster-secret"}
    assert told["redis-url"].startswith(f"redis://{part}@")


def test_processes_without_certificates_share_a_secret() -> None:
    def secrets(*more: str) -> set[str]:
        manifests = render(*more)
        found = [environment(one, manifests) for _, one in containers(manifests)]
        return {env["BATON_CLUSTER_SECRET"] for env in found if "BATON_CLUSTER_SECRET" in env}

    plain = "disaggregated-plain-values.yaml"
    (derived,) = secrets(plain)
    assert len(derived) >= 32
    assert "example-index" not in derived
    (other,) = secrets(plain, "--set=redis.password=another")
    assert other != derived
    assert secrets(plain, f"--set=clusterSecret.value={'x' * 32}") == {"x" * 32}
    # With certificates no worker needs one, and none has one.
    assert secrets(plain, CERTIFICATES) == set()
