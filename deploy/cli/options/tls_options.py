"""TLS options of the commands that connect to a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options.command_line import CONNECTION, DEFAULT_HTTP, fail
from deploy.cli.options.exit_codes import ExitCode

if TYPE_CHECKING:
    from baton.security.tls import TlsFiles
    from deploy.processes.cluster_state import ClusterState

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Options for TLS.

    A cluster of this user on this machine needs none: its state file has them.
    """

    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="BATON_CA",
            help="CA certificate (PEM) that verifies the router; turns on TLS. Default: as your"
            " cluster on this machine is set up; with https:// the system's CAs.",
            rich_help_panel=CONNECTION,
        ),
    ] = None
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="BATON_CERTIFICATE",
            help="Client certificate (PEM), if the cluster requires one.",
            rich_help_panel=CONNECTION,
        ),
    ] = None
    certificate_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="BATON_CERTIFICATE_KEY",
            help="Private key (PEM) of --certificate.",
            rich_help_panel=CONNECTION,
        ),
    ] = None

    def files(self, cluster: ClusterState | None, address: str = "") -> TlsFiles | None:
        """Return the TLS files for connections to a cluster; None without TLS. ``address`` is the
        one that the user gave, with or without https."""
        from baton.security.tls import TlsFiles  # noqa: PLC0415

        if bool(self.certificate) != bool(self.certificate_key):
            fail("give --certificate and --certificate-key together", code=ExitCode.USAGE)
        if self.ca or self.certificate:
            return TlsFiles(self.certificate, self.certificate_key, self.ca)
        if cluster is not None and cluster.tls:
            return cluster.tls_files
        return TlsFiles() if address.startswith("https://") else None

    def url_of(
        self, http: str | None, cluster: ClusterState | None, *, operators: bool = False
    ) -> str:
        """Return the URL of the cluster's router, without a path.

        ``http`` is the address that the user gave. Without it, ``operators`` selects the operators'
        endpoints.
        """
        known = DEFAULT_HTTP
        if cluster is not None:
            known = cluster.operators if operators else cluster.http
        address = http or known
        if "://" not in address:
            address = f"{'http' if self.files(cluster) is None else 'https'}://{address}"
        return _checked(address.rstrip("/"))


def _checked(url: str) -> str:
    """Return ``url``; ends the command if no client could connect to it."""
    import httpx  # noqa: PLC0415

    try:
        parsed = httpx.URL(url)
        is_good = parsed.scheme in ("http", "https") and bool(parsed.host)
        is_good = is_good and (parsed.port or 0) <= _MAX_PORT
    except httpx.InvalidURL:
        is_good = False
    if not is_good:
        fail(f"{url!r} is not an address of a router: give HOST:PORT", code=ExitCode.USAGE)
    return url
