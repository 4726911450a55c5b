"""Certificates of `baton certs init`, for tests on the loopback interface."""

from __future__ import annotations

from pathlib import Path

from baton.security.tls import AUTHORITY_FILE, PeerRole, TlsFiles
from deploy import certificates


class Authority:
    """Signs certificates that are valid for a day."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        """Its files are in ``folder``/``name``."""
        self.folder = folder / name
        self.certificate = self.folder / AUTHORITY_FILE
        certificates.init(self.folder, cluster=name, days=1, authority_days=1)

    def sign(self, name: str, role: PeerRole = "worker") -> TlsFiles:
        """Another certificate, for 127.0.0.1 where the role has hosts."""
        hosts = certificates.LOOPBACK_NAMES if role in ("router", "worker", "redis") else ()
        certificate = certificates.issue(self.folder, name, role, hosts, days=1)
        return TlsFiles(certificate, certificate.with_suffix(".key"), self.certificate)
