"""What rendered manifests say of pods: their containers, volumes, probes and how they end."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Manifest: TypeAlias = dict[str, Any]

_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_IMAGE_ENTRYPOINT = ("baton",)
"""That of the image, without its init process."""


@dataclass(frozen=True, slots=True)
class Objects:
    """All objects of a release, by kind and name."""

    all: tuple[Manifest, ...]

    def of_kind(self, *kinds: str) -> Iterator[Manifest]:
        """Yield the objects of some kinds."""
        return (one for one in self.all if one["kind"] in kinds)

    def the(self, kind: str, name: str) -> Manifest:
        """Return one object."""
        (found,) = [one for one in self.of_kind(kind) if one["metadata"]["name"] == name]
        return found

    def data_of(self, kind: str, name: str) -> dict[str, bytes]:
        """Return the files of a Secret or ConfigMap."""
        one = self.the(kind, name)
        told = one.get("data") or {}
        if kind == "Secret":
            found = {key: base64.b64decode(text) for key, text in told.items()}
            return found | {
                key: str(text).encode() for key, text in (one.get("stringData") or {}).items()
            }
        return {key: str(text).encode() for key, text in told.items()}


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe of a container."""

    action: Mapping[str, Any]
    """The manifest's ``httpGet``, ``tcpSocket`` or ``exec``."""
    period_s: float
    failures: int

    @classmethod
    def of(cls, told: Mapping[str, Any] | None) -> Probe | None:
        """Return the probe of a manifest's part."""
        if told is None:
            return None
        period = float(told.get("periodSeconds", 10))
        return cls(told, period, int(told.get("failureThreshold", 3)))


@dataclass(frozen=True, slots=True)
class Container:
    """A container as a pod's template describes it."""

    spec: Manifest

    @property
    def name(self) -> str:
        """Its name in the pod."""
        return str(self.spec["name"])

    def environment(self, objects: Objects, facts: Mapping[str, str]) -> dict[str, str]:
        """Return its variables. ``facts`` are the values of the downward API, by field path."""
        found: dict[str, str] = {}
        for one in self.spec.get("env", ()):
            source = one.get("valueFrom") or {}
            if "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                data = objects.data_of("Secret", reference["name"])
                if reference["key"] not in data and reference.get("optional"):
                    continue
                found[one["name"]] = data[reference["key"]].decode()
            elif "fieldRef" in source:
                found[one["name"]] = facts[source["fieldRef"]["fieldPath"]]
            else:
                found[one["name"]] = _expanded(str(one.get("value", "")), found)
        return found

    def command(self, variables: Mapping[str, str]) -> list[str]:
        """Return the command line, without tini: the namespace has an init process."""
        words = [*self.spec.get("command", _IMAGE_ENTRYPOINT), *self.spec.get("args", ())]
        expanded = [_expanded(str(word), variables) for word in words]
        return expanded[2:] if expanded[:2] == ["tini", "--"] else expanded

    def port(self, name: str | int) -> int:
        """Return the number of a port, which may have a name."""
        if isinstance(name, int):
            return name
        ports = {one["name"]: one["containerPort"] for one in self.spec.get("ports", ())}
        return int(ports[name])

    def probe(self, kind: str) -> Probe | None:
        """Return the probe of a kind: startup, readiness or liveness."""
        return Probe.of(self.spec.get(f"{kind}Probe"))

    @property
    def pre_stop(self) -> list[str] | None:
        """The command that runs before SIGTERM."""
        hook = (self.spec.get("lifecycle") or {}).get("preStop") or {}
        command: list[str] | None = hook.get("exec", {}).get("command")
        return command


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet."""

    kind: str
    name: str
    replicas: int
    template: Manifest = field(compare=False)
    max_surge: int = 0
    max_unavailable: int = 1
    claims: tuple[str, ...] = ()
    """Names of volumes that outlive a pod of a StatefulSet."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of its pods."""
        return dict(self.template["metadata"].get("labels", {}))

    @property
    def spec(self) -> Manifest:
        """The pods' specification."""
        return dict(self.template["spec"])

    @property
    def revision(self) -> str:
        """A hash of the template: pods of another revision are replaced."""
        text = json.dumps(self.template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def init_containers(self) -> Sequence[Container]:
        """Containers that run first, one after the other."""
        return [Container(one) for one in self.spec.get("initContainers", ())]

    @property
    def containers(self) -> Sequence[Container]:
        """Containers that run together."""
        return [Container(one) for one in self.spec["containers"]]

    @property
    def grace_s(self) -> float:
        """Seconds between the start of a pod's end and SIGKILL."""
        return float(self.spec.get("terminationGracePeriodSeconds", 30))


def workloads(objects: Objects) -> list[Workload]:
    """Return the workloads that a controller keeps running."""
    found = []
    for one in objects.of_kind("Deployment", "StatefulSet"):
        spec = one["spec"]
        rolling = (spec.get("strategy") or {}).get("rollingUpdate") or {}
        replicas = int(spec.get("replicas", 1))
        is_set = one["kind"] == "StatefulSet"
        recreates = (spec.get("strategy") or {}).get("type") == "Recreate"
        default_surge = 0 if is_set or recreates else 1
        found.append(
            Workload(
                one["kind"],
                one["metadata"]["name"],
                replicas,
                spec["template"],
                max_surge=_number(rolling.get("maxSurge", default_surge), replicas),
                max_unavailable=_number(
                    rolling.get("maxUnavailable", replicas if recreates else 1 - default_surge),
                    replicas,
                ),
                claims=tuple(
                    claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())
                ),
            )
        )
    return found


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector, or a Service's plain one, selects labels."""
    if selector is None:
        return False
    plain = selector if _is_plain(selector) else selector.get("matchLabels") or {}
    rules = () if _is_plain(selector) else selector.get("matchExpressions") or ()
    for rule in rules:
        value, wanted = labels.get(rule["key"]), rule.get("values", ())
        holds = {
            "In": value in wanted,
            "NotIn": value not in wanted,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[rule["operator"]]
        if not holds:
            return False
    return all(labels.get(key) == value for key, value in plain.items())


def _is_plain(selector: Mapping[str, Any]) -> bool:
    return not {"matchLabels", "matchExpressions"} & selector.keys()


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return _REFERENCE.sub(lambda found: variables.get(found[1], found[0]), text)


def _number(told: int | str, replicas: int) -> int:
    if isinstance(told, str) and told.endswith("%"):
        return max(1, replicas * int(told[:-1]) // 100)
    return int(told)
