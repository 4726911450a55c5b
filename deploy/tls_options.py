"""The options of commands that ask a cluster: whom they trust, and what they show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command_line import DEFAULT_HTTP, fail

if TYPE_CHECKING:
    from baton.tls import TlsFiles
    from deploy.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Of a cluster on this machine everything is known without them."""

    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="BATON_CA",
            help="Ask by TLS, and trust this authority (PEM). Default: what the cluster on this"
            " machine says; with https:// what the system trusts.",
        ),
    ] = None
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="BATON_CERTIFICATE",
            help="Show this certificate (PEM), where the cluster asks for one.",
        ),
    ] = None
    certificate_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="BATON_CERTIFICATE_KEY", help="Its key (PEM)."),
    ] = None

    def files(self, cluster: ClusterState | None, address: str = "") -> TlsFiles | None:
        """None where there is no TLS. ``address``: what the user gave, with or without https."""
        from baton.tls import TlsFiles  # noqa: PLC0415

        if bool(self.certificate) != bool(self.certificate_key):
            fail("--certificate and --certificate-key go together")
        if self.ca or self.certificate:
            return TlsFiles(self.certificate, self.certificate_key, self.ca)
        if cluster is not None and cluster.tls:
            return cluster.tls_files
        return TlsFiles() if address.startswith("https://") else None

    def url_of(
        self, http: str | None, cluster: ClusterState | None, *, operators: bool = False
    ) -> str:
        """Of the HTTP front, without a path. ``http``: what the user gave; ``operators``: where

        their endpoints are, otherwise.
        """
        known = DEFAULT_HTTP
        if cluster is not None:
            known = cluster.operators if operators else cluster.http
        address = http or known
        if "://" in address:
            return address.rstrip("/")
        return f"{'http' if self.files(cluster) is None else 'https'}://{address}"
