"""Does what KubeRay and cert-manager do for a RayCluster with ``tlsOptions``: a CA, and
certificates that have the addresses of Ray's pods.

Source: ray-operator/controllers/ray/raycluster_mtls_controller.go of KubeRay 1.7.0.
"""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.manifests import Manifest

KINDS = ("head", "worker")
_LOOK_S = 0.5
_SIGN_S = 60.0
_CA = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
_LEAF = (
    "basicConstraints=critical,CA:FALSE",
    "keyUsage=critical,digitalSignature,keyEncipherment",
    "extendedKeyUsage=serverAuth,clientAuth",
)


def has_tls(cluster: Manifest) -> bool:
    """Whether a RayCluster wants certificates."""
    return bool((cluster["spec"].get("tlsOptions") or {}).get("enabled"))


def secret_of(kind: str, cluster: str) -> str:
    """Return the name of the Secret that Ray's pods of a kind mount."""
    return f"ray-{kind}-secret-{cluster}"


class RayCertificates:
    """The CA of a release's RayCluster, and the Secrets that it has signed. Owned by one event
    loop."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is for the files of keys and certificates."""
        folder.mkdir()
        self._folder = folder
        self._secrets: dict[str, Manifest] = {}
        self._addresses: dict[str, list[str]] = {}
        """Those in the certificate of each kind of pods."""
        self._cluster = ""

    @property
    def authority(self) -> Path:
        """The CA's certificate."""
        return self._folder / "ca.crt"

    def files(self, kind: str) -> tuple[Path, Path]:
        """Return the certificate and key of a kind of pods."""
        return self._folder / f"{kind}.crt", self._folder / f"{kind}.key"

    def secrets(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Return the Secrets of a release's RayCluster; none without ``tlsOptions``."""
        for one in manifests:
            if one["kind"] == "RayCluster" and has_tls(one) and not self._cluster:
                self._cluster = one["metadata"]["name"]
                self._sign("ca", f"/CN=ray-ca-{self._cluster}", 3650, _CA, "rsa:4096", signer="")
                for kind in KINDS:
                    self._secrets[kind] = self._issue(kind, [])
        for one in manifests:
            issuer = f"ray-ca-issuer-{self._cluster}"
            if one["kind"] == "Certificate" and one["spec"]["issuerRef"]["name"] == issuer:
                name = one["spec"]["secretName"]
                if name not in self._secrets:
                    assert one["spec"]["isCA"]
                    self._sign(name, f"/CN={one['spec']['commonName']}", 180, _CA, "rsa:2048")
                    self._secrets[name] = self._secret(name, name)
        return list(self._secrets.values())

    async def follow(self, there: Cluster) -> None:
        """Keep the addresses of Ray's pods in their certificates, until cancelled."""
        while True:
            for kind in KINDS if self._cluster else ():
                wanted = {"ray.io/cluster": self._cluster, "ray.io/node-type": kind}
                found = sorted(
                    pod.address
                    for pod in there.pods.values()
                    if wanted.items() <= pod.workload.labels.items() and not pod.ending
                )
                if found != self._addresses.get(kind):
                    self._secrets[kind] = await asyncio.to_thread(self._issue, kind, found)
                    self._addresses[kind] = found
                    there.replace(self._secrets[kind])
            await asyncio.sleep(_LOOK_S)

    def _issue(self, kind: str, addresses: Sequence[str]) -> Manifest:
        names = ["IP:127.0.0.1", "DNS:localhost", *(f"IP:{one}" for one in addresses)]
        if kind == "head":
            names.append(f"DNS:{self._cluster}-head-svc.default.svc.cluster.local")
        more = f"subjectAltName=critical,{','.join(names)}"
        self._sign(kind, "/", 90, (*_LEAF, more), "rsa:2048")
        return self._secret(secret_of(kind, self._cluster), kind)

    def _secret(self, name: str, files: str) -> Manifest:
        paths = {"ca.crt": self.authority} | {
            f"tls.{end}": self._folder / f"{files}.{end}" for end in ("crt", "key")
        }
        data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in paths.items()}
        return {"kind": "Secret", "metadata": {"name": name}, "data": data}

    def _sign(
        self,
        name: str,
        subject: str,
        days: int,
        extensions: Sequence[str],
        key: str,
        signer: str = "ca",
    ) -> None:
        """Write ``name``.crt and ``name``.key. Without a signer it signs itself."""
        command = ["openssl", "req", "-x509", "-config", "/dev/null", "-nodes", "-subj", subject]
        command += ["-newkey", key, "-keyout", f"{name}.key", "-out", f"{name}.crt"]
        command += ["-days", str(days)]
        if signer:
            command += ["-CA", f"{signer}.crt", "-CAkey", f"{signer}.key"]
        for one in extensions:
            command += ["-addext", one]
        subprocess.run(command, cwd=self._folder, capture_output=True, timeout=_SIGN_S, check=True)
