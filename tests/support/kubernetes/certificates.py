"""Does what cert-manager does with the Certificates of a release."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from pathlib import Path

from baton.security.tls import ROLES, PeerRole, role_name
from deploy.certificates import init, issue
from tests.support.kubernetes.manifests import Manifest


class CertificateManager:
    """A CA, and the Secrets with the certificates that it has issued."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is for the CA's files."""
        init(folder)
        self._folder = folder
        self._count = itertools.count(1)

    @property
    def authority(self) -> Path:
        """The CA's certificate."""
        return self._folder / "ca.pem"

    def issue(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Return a Secret with a new key for each Certificate of a role."""
        found = []
        for one in manifests:
            if one["kind"] == "Certificate" and not one["spec"].get("isCA"):
                found.append(self._secret(one["spec"]))
        return found

    def _secret(self, spec: Manifest) -> Manifest:
        names = list(spec["dnsNames"])
        role: PeerRole = next(role for role in ROLES if role_name(role) in names)
        hosts = [name for name in names if name != role_name(role)]
        path = issue(self._folder, f"issued-{next(self._count)}", role, hosts)
        files = {"ca.crt": self.authority, "tls.crt": path, "tls.key": path.with_suffix(".key")}
        data = {key: base64.b64encode(file.read_bytes()).decode() for key, file in files.items()}
        return {"kind": "Secret", "metadata": {"name": spec["secretName"]}, "data": data}
