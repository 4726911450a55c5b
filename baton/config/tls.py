"""Settings of TLS: which connections are encrypted, and with which certificates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import model_validator

from baton.config.fields import AbsolutePath, Section
from baton.security.tls import PeerRole, TlsFiles


class TlsConfig(Section):
    """Certificates of the listeners and of the cluster's own connections;
    docs/explanation/security.md."""

    folder: AbsolutePath = ""
    """Folder of certificates that ``baton certs init`` has made. The listeners then serve TLS only,
    and routers, workers and the supervisor show each other certificates of this cluster."""
    certificate: AbsolutePath = ""
    """Certificate of the listeners that a public CA has signed, a PEM file with the intermediate
    certificates; empty takes ``router.pem`` of ``folder``."""
    key: AbsolutePath = ""
    """Private key of ``certificate``, a PEM file."""
    client_ca: AbsolutePath = ""
    """CA that must have signed the certificates of clients, a PEM file, for example ``ca.pem`` of
    ``folder``; empty requires no certificates of clients."""
    redis_ca: AbsolutePath = ""
    """CA of the certificate of a ``rediss://`` server, a PEM file; empty takes ``ca.pem`` of
    ``folder``, or the system's CAs without a folder."""
    clear_kv: bool = False
    """Allow ranks of one worker on several machines although there is a ``folder``. What ranks
    send each other is neither encrypted nor authenticated, and is refused otherwise."""

    @model_validator(mode="after")
    def _goes_together(self) -> TlsConfig:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key go together")
        if self.client_ca and not self.folder:
            raise ValueError(
                "client_ca needs a folder: health checks of routers show a certificate of it"
            )
        return self

    def of(self, role: PeerRole) -> TlsFiles | None:
        """Return the files that a role uses within the cluster; None without encryption."""
        return TlsFiles.in_folder(Path(self.folder), role) if self.folder else None

    @property
    def front_client(self) -> TlsFiles | None:
        """Return the files with which a command on this machine connects to the listeners.

        They are the certificate that it shows, and the CA that it trusts. None without TLS.
        """
        if self.fronts is None:
            return None
        own = self.of("supervisor")
        trusted = None if own is None or self.certificate else own.authority
        shown = own if self.client_ca else None
        return replace(shown or TlsFiles(), authority=trusted)

    @property
    def fronts(self) -> TlsFiles | None:
        """Return the listeners' certificate, and the CA of the client certificates that they
        require.

        None without TLS.
        """
        own = self.of("router")
        asked = Path(self.client_ca) if self.client_ca else None
        if self.certificate:
            return TlsFiles(Path(self.certificate), Path(self.key), asked)
        return None if own is None else replace(own, authority=asked)
