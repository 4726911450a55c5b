"""What NetworkPolicies allow: pure functions of labels and ports.

The rules are those of Kubernetes: a pod that no policy selects for a direction is open in it; for
others, a connection needs a rule of some policy. A connection is allowed if the egress of its
source and the ingress of its target are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.kubernetes.manifests import Manifest, selects

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class End:
    """A pod at one end of a connection."""

    name: str
    labels: Mapping[str, str]
    namespace: str = "default"
    ports: Mapping[str, int] | None = None
    """Its named ports."""


def allowed(policies: Sequence[Manifest], source: End, target: End, port: int) -> bool:
    """Whether a connection from one pod to a port of another is allowed."""
    return _direction(policies, "Egress", source, target, target, port) and _direction(
        policies, "Ingress", target, source, target, port
    )


def _direction(
    policies: Sequence[Manifest], kind: str, of: End, other: End, target: End, port: int
) -> bool:
    own = [
        one["spec"]
        for one in policies
        if one["metadata"].get("namespace", "default") == of.namespace
        and kind in one["spec"].get("policyTypes", ["Ingress"])
        and selects(one["spec"]["podSelector"], of.labels)
    ]
    if not own:
        return True
    peers = "from" if kind == "Ingress" else "to"
    rules = [rule for spec in own for rule in spec.get(kind.lower()) or ()]
    return any(
        _is_peer(rule.get(peers), of, other) and _is_port(rule.get("ports"), target, port)
        for rule in rules
    )


def _is_peer(peers: Sequence[Mapping[str, Any]] | None, of: End, other: End) -> bool:
    if not peers:
        return True
    for peer in peers:
        if "ipBlock" in peer:
            continue  # pods are named by labels
        spaces = peer.get("namespaceSelector")
        if spaces is None:
            in_space = other.namespace == of.namespace
        else:
            in_space = selects(spaces, {NAMESPACE_LABEL: other.namespace})
        pods = peer.get("podSelector")
        if in_space and (pods is None or selects(pods, other.labels)):
            return True
    return False


def _is_port(ports: Sequence[Mapping[str, Any]] | None, target: End, port: int) -> bool:
    if not ports:
        return True
    for one in ports:
        told = one.get("port")
        first = (target.ports or {}).get(told) if isinstance(told, str) else told
        if told is None or (first is not None and first <= port <= one.get("endPort", first)):
            return True
    return False
