"""Does what the operator KubeRay does with a RayCluster: pods, variables, a Service and a token.

Source: ray-operator/controllers/ray/common/pod.go of github.com/ray-project/kuberay (August 2026).
``ray_certificates.py`` has the Secrets of ``tlsOptions``.
Ray's pods become Deployments here. A pod's template never replaces pods there
(``upgradeStrategy: None``), and tests do not change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import deepcopy

from tests.support.kubernetes.manifests import Manifest
from tests.support.kubernetes.ray_certificates import has_tls, secret_of

_HEAD_PORT = "6379"
_TLS = "/etc/ray/tls"
_WAIT_TLS = (
    f"until openssl x509 -in {_TLS}/tls.crt -noout -text 2>/dev/null "
    '| grep -qE "IP Address:$POD_IP([^0-9.]|$)"; do sleep 1; done'
)
_WAIT = "until ray health-check --address {address} >/dev/null 2>&1; do sleep 1; done"


def expanded(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the objects of a release, with what KubeRay makes of its RayClusters."""
    found = list(manifests)
    for one in manifests:
        if one["kind"] == "RayCluster":
            found += _made(one)
    return found


def _made(cluster: Manifest) -> list[Manifest]:
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    token = hashlib.sha256(f"token of {name}".encode()).hexdigest()
    head = spec["headGroupSpec"]
    return [
        {"kind": "Secret", "metadata": {"name": name}, "stringData": {"auth_token": token}},
        {
            "kind": "Service",
            "metadata": {"name": f"{name}-head-svc"},
            "spec": {
                "selector": {"ray.io/cluster": name, "ray.io/node-type": "head"},
                "ports": [{"name": "gcs-server", "port": int(_HEAD_PORT)}],
            },
        },
        _pods(cluster, "head", head, 1),
        *(
            _pods(cluster, group["groupName"], group, int(group["replicas"]))
            for group in spec["workerGroupSpecs"]
        ),
    ]


def _pods(cluster: Manifest, group: str, told: Manifest, count: int) -> Manifest:
    name, template = cluster["metadata"]["name"], deepcopy(told["template"])
    kind = "head" if group == "head" else "worker"
    labels = {"ray.io/cluster": name, "ray.io/node-type": kind, "ray.io/group": group}
    template["metadata"]["labels"] |= labels
    container = template["spec"]["containers"][0]
    service = f"{name}-head-svc.default.svc.cluster.local"
    where = "127.0.0.1" if kind == "head" else service
    secret = {"secretKeyRef": {"name": name, "key": "auth_token"}}
    token = [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": secret},
    ]
    own, store = container.get("env", []), cluster["spec"]["gcsFaultToleranceOptions"]
    start = {"dashboard-agent-listen-port": "52365", "metrics-export-port": "8080", "block": "true"}
    start |= told["rayStartParams"]
    if kind == "head":
        start = {"dashboard-host": "0.0.0.0"} | start
        own = [
            *own,
            {"name": "RAY_external_storage_namespace", "value": store["externalStorageNamespace"]},
            {"name": "RAY_REDIS_ADDRESS", "value": store["redisAddress"]},
        ]
        if "redisPassword" in store:
            start["redis-password"] = "$REDIS_PASSWORD"
            own.append({"name": "REDIS_PASSWORD", **store["redisPassword"]})
    else:
        waiting = {
            "name": "wait-gcs-ready",
            "command": ["/bin/bash", "-c", "--"],
            "args": [_WAIT.format(address=f"{service}:{_HEAD_PORT}")],
            "env": [*own, *token],
            "volumeMounts": container.get("volumeMounts", []),
            "securityContext": container.get("securityContext", {}),
        }
        template["spec"].setdefault("initContainers", []).append(waiting)
        start["address"] = f"{service}:{_HEAD_PORT}"
        own = [
            *own,
            {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"},
            {"name": "FQ_RAY_IP", "value": service},
        ]
    container["env"] = [
        *own,
        *token,
        {"name": "RAY_CLUSTER_NAME", "value": name},
        {
            "name": "RAY_CLOUD_INSTANCE_ID",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
        },
        {"name": "RAY_NODE_TYPE_NAME", "value": group},
        {"name": "KUBERAY_GEN_RAY_START_CMD", "value": _start_command(kind, start)},
        {"name": "RAY_PORT", "value": _HEAD_PORT},
        {"name": "RAY_ADDRESS", "value": f"{where}:{_HEAD_PORT}"},
    ]
    if has_tls(cluster):
        _give_certificates(template["spec"], secret_of(kind, name))
    return {
        "kind": "Deployment",
        "metadata": {"name": f"{name}-{group}"},
        "spec": {"replicas": count, "strategy": {"type": "Recreate"}, "template": template},
    }


def _give_certificates(pod: Manifest, secret: str) -> None:
    """Mount a Secret of certificates, and wait until it has the pod's address."""
    pod.setdefault("volumes", []).append({"name": "ray-tls", "secret": {"secretName": secret}})
    mount = {"name": "ray-tls", "mountPath": _TLS, "readOnly": True}
    inits, container = pod.setdefault("initContainers", []), pod["containers"][0]
    for one in (container, *(init for init in inits if init["name"] == "wait-gcs-ready")):
        one["volumeMounts"] = [*one.get("volumeMounts", []), mount]
        one["env"] += [
            {"name": "RAY_USE_TLS", "value": "1"},
            {"name": "RAY_TLS_SERVER_CERT", "value": f"{_TLS}/tls.crt"},
            {"name": "RAY_TLS_SERVER_KEY", "value": f"{_TLS}/tls.key"},
            {"name": "RAY_TLS_CA_CERT", "value": f"{_TLS}/ca.crt"},
        ]
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    waiting = {
        "name": "wait-for-tls-ip-san",
        "command": ["sh", "-c"],
        "args": [_WAIT_TLS],
        "env": [{"name": "POD_IP", "valueFrom": address}],
        "volumeMounts": [mount],
        "securityContext": container.get("securityContext", {}),
    }
    inits.insert(0, waiting)


def _start_command(kind: str, told: dict[str, str]) -> str:
    flags = ""
    for option, value in sorted(told.items()):
        is_switch = value in ("true", "false") and option != "include-dashboard"
        if not is_switch:
            flags += f" --{option}={value} "
        elif value == "true":
            flags += f" --{option} "
    return f"ray start --head {flags}" if kind == "head" else f"ray start {flags}"
