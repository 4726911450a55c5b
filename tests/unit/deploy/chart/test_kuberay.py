"""The RayCluster and the launchers of mode kuberay."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from deploy.workers.ranks import WORKER_RESOURCE
from tests.support.deploy.baton_commands import parse
from tests.support.deploy.chart import KUBERAY_SETS, Manifest, of_kind, render, the

ROOT = Path(__file__).parents[4]
_TLS = "/etc/ray/tls"


def _cluster(value_set: str, *more: str) -> Manifest:
    (cluster,) = of_kind(render(value_set, *more), "RayCluster")
    return cluster


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_launchers_have_the_token_that_kuberay_makes(value_set: str) -> None:
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


def test_ray_s_connections_are_encrypted_on_request() -> None:
    def told(value: str) -> tuple[Any, Any, set[str], set[str]]:
        manifests = render("kuberay-values.yaml", f"--set=kuberay.tls={value}")
        (cluster,) = of_kind(manifests, "RayCluster")
        pod = the(manifests, "Deployment", "demo-baton-launcher")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {one["mountPath"] for one in container["volumeMounts"]}
        names = {one["name"] for one in container["env"] if "TLS" in one["name"]}
        inits = [one["name"] for one in pod.get("initContainers", ())]
        return cluster["spec"].get("tlsOptions"), inits, mounts & {_TLS, "/etc/ray/ca"}, names

    variables = ("USE_TLS", "TLS_SERVER_CERT", "TLS_SERVER_KEY", "TLS_CA_CERT")
    names = {"BATON_TLS__FOLDER"} | {f"RAY_{name}" for name in variables}
    # The CA's key is not in the container that serves.
    assert told("true") == ({"enabled": True}, ["ray-certificate"], {_TLS}, names)
    assert told("false") == (None, [], set(), {"BATON_TLS__FOLDER"})
    assert not of_kind(render("kuberay-plain-values.yaml"), "Certificate")


@pytest.mark.parametrize("address", ["10.1.2.3", "fd00::1"])
def test_a_launcher_signs_the_certificate_of_its_own_address(address: str, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    manifests = render("kuberay-values.yaml")
    authority = the(manifests, "Certificate", "demo-baton-ray-launcher-ca")["spec"]
    assert authority["isCA"]
    assert authority["issuerRef"]["name"] == "ray-ca-issuer-demo-baton-ray"
    pod = the(manifests, "Deployment", "demo-baton-launcher")["spec"]["template"]["spec"]
    (signs,), (launcher,) = pod["initContainers"], pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    sources = volumes["ray-launcher-ca"]["projected"]["sources"]
    files = {
        one["secret"]["name"]: {item["path"] for item in one["secret"]["items"]} for one in sources
    }
    assert files == {
        authority["secretName"]: {"tls.crt", "tls.key"},
        "ray-worker-secret-demo-baton-ray": {"ca.crt"},
    }
    assert volumes["ray-tls"]["emptyDir"]["medium"] == "Memory"
    given, own = tmp_path / "ca", tmp_path / "tls"
    given.mkdir()
    own.mkdir()
    root = _authority(given, "root", None)
    signer = _authority(given, "tls", "root")
    (given / "root.crt").rename(given / "ca.crt")
    command = [*signs["command"][:-1], signs["command"][-1].replace("/etc/ray", str(tmp_path))]
    told = {"PATH": os.environ["PATH"], "POD_IP": address, "POD_NAME": "a-launcher"}

    def sign() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=told, capture_output=True, text=True, timeout=60, check=False
        )

    done = sign()
    assert done.returncode == 0, done.stderr
    variables = {one["name"]: one.get("value") for one in launcher["env"]}
    paths = [variables[f"RAY_TLS_{name}"] for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")]
    served, key, trusted = (Path(str(one).replace("/etc/ray", str(tmp_path))) for one in paths)
    leaf, issuer = x509.load_pem_x509_certificates(served.read_bytes())
    leaf.verify_directly_issued_by(issuer)
    assert issuer == signer
    assert x509.load_pem_x509_certificate(trusted.read_bytes()) == root
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == [address, "127.0.0.1"]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    # The CA is renewed before that.
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days == 90
    assert int(authority["renewBefore"].removesuffix("h")) >= 90 * 24
    assert key.stat().st_mode & 0o777 == 0o600
    context = ssl.create_default_context(cafile=str(trusted))
    context.load_cert_chain(served, key)
    # A new RayCluster has another CA, while cert-manager keeps the Secret of the launchers' own.
    before = served.read_bytes()
    _authority(given, "ca", None)
    done = sign()
    assert done.returncode == 1
    assert f"delete the Secret {authority['secretName']}" in done.stderr
    assert served.read_bytes() == before


def _authority(folder: Path, name: str, signer: str | None) -> x509.Certificate:
    """Make a CA as cert-manager does."""
    command = ["openssl", "req", "-x509", "-config", "/dev/null", "-nodes", "-subj", f"/CN={name}"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "180"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
    command += ["-addext", "basicConstraints=critical,CA:TRUE"]
    command += ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    if signer is not None:
        command += ["-CA", f"{signer}.crt", "-CAkey", f"{signer}.key"]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=True)
    return x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_a_second_launcher_waits_on_another_host(value_set: str) -> None:
    launcher = the(render(value_set), "Deployment", "demo-baton-launcher")["spec"]
    assert launcher["replicas"] == 2
    assert launcher["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 1}
    (spread,) = launcher["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    if value_set == "kuberay-values.yaml":
        assert launcher["template"]["spec"]["priorityClassName"] == "serving"


def test_a_cluster_without_a_prefill_pool_has_no_pods_for_one() -> None:
    """A pool that starts empty keeps its pods, since it may grow."""

    def groups(*more: str) -> list[str]:
        specs = _cluster("kuberay-values.yaml", *more)["spec"]["workerGroupSpecs"]
        return [group["groupName"] for group in specs]

    alone = '[{"name": "decode", "role": "decode", "resources": {"baton_decode": 1}}]'
    assert groups() == ["prefill", "decode"]
    assert groups(f"--set-json=config.pools={alone}") == ["decode"]
    assert groups("--set=config.pools[0].count=0") == ["prefill", "decode"]


def test_pools_have_pods_of_their_own() -> None:
    spec = _cluster("kuberay-values.yaml")["spec"]
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
        assert joins["address"] == "demo-baton-ray-head-svc.default.svc.cluster.local:6379"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports[container["readinessProbe"]["tcpSocket"]["port"]] == joins["port"]
    pod = groups["decode"]["template"]["spec"]
    assert pod["nodeSelector"] == {"example.com/accelerator": "h200"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
        "tolerations"
    ]
    assert pod["topologySpreadConstraints"]
    assert pod["priorityClassName"] == "serving"
    assert "nodeSelector" not in groups["prefill"]["template"]["spec"]
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == "redis://gcs.example.com:6380"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_a_budget_keeps_pods_of_a_role() -> None:
    """By a number: Kubernetes does not know how many pods a RayCluster should have."""
    manifests = render("kuberay-values.yaml")
    budget = the(manifests, "PodDisruptionBudget", "demo-baton-prefill")["spec"]
    assert budget["minAvailable"] == 1
    (cluster,) = of_kind(manifests, "RayCluster")
    labels = [
        group["template"]["metadata"]["labels"] for group in cluster["spec"]["workerGroupSpecs"]
    ]
    wanted = budget["selector"]["matchLabels"].items()
    assert [wanted <= one.items() for one in labels] == [True, False]


def test_the_operator_knows_gangs_and_upgrades() -> None:
    cluster = _cluster(
        "kuberay-values.yaml",
        "--set=kuberay.upgradeStrategy=Recreate",
        "--set=kuberay.annotations.example\\.com/note=a",
    )
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "serving"
    assert cluster["metadata"]["annotations"]["example.com/note"] == "a"
    assert cluster["spec"]["upgradeStrategy"] == {"type": "Recreate"}
    plain = _cluster("kuberay-plain-values.yaml")
    assert plain["spec"]["upgradeStrategy"] == {"type": "None"}


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_only_a_head_with_an_autoscaler_has_a_token_of_kubernetes(value_set: str) -> None:
    spec = _cluster(value_set)["spec"]
    head = spec["headGroupSpec"]["template"]["spec"]
    # KubeRay gives the head a service account of its own, whose token the autoscaler needs.
    assert head.get("automountServiceAccountToken", True) is spec["enableInTreeAutoscaling"]


def test_ray_takes_its_parameters() -> None:
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    options = (Path(found.origin).parent / "scripts" / "scripts.py").read_text()
    spec = _cluster("kuberay-values.yaml")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(f'"--{name}"' in options for name in group["rayStartParams"])


def test_rays_version_is_the_one_that_is_installed() -> None:
    lines = (ROOT / "requirements" / "cuda.lock").read_text().splitlines()
    assert f"ray=={_cluster('kuberay-values.yaml')['spec']['rayVersion']} \\" in lines


@pytest.mark.parametrize("value_set", KUBERAY_SETS)
def test_rays_memory_monitor_is_off_in_every_pod(value_set: str) -> None:
    manifests = render(value_set)
    (cluster,) = of_kind(manifests, "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pods = [group["template"] for group in groups]
    pods.append(the(manifests, "Deployment", "demo-baton-launcher")["spec"]["template"])
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        variables = {one["name"]: one.get("value") for one in container["env"]}
        assert variables["RAY_memory_monitor_refresh_ms"] == "0"
        assert variables["RAY_worker_oom_score_adjustment"] == "0"
