"""Fetches the /metrics pages of workers and of the supervisor. If the cluster has certificates, TLS
is used."""

from __future__ import annotations

import asyncio

import httpx

from baton.security.tls import LiveContext, PeerRole, TlsFiles, client_context, role_name


class MetricsPages:
    """Fetches /metrics pages. Owned by the router's event loop."""

    def __init__(self, files: TlsFiles | None) -> None:
        """Create a fetcher of metrics pages. ``files``: the router's certificate, if other
        processes require one.

        Raises ConfigError if the certificate cannot be used.
        """
        self._tls = None if files is None else LiveContext(client_context(files), files)
        self.scheme = "http" if files is None else "https"

    def client(self, timeout_s: float) -> httpx.AsyncClient:
        """Create an HTTP client for metrics pages. It has connections of its own and uses no
        proxy."""
        # Without certificates, workers speak plain HTTP and there is nothing to verify.
        verify = False if self._tls is None else self._tls.get()
        return httpx.AsyncClient(trust_env=False, verify=verify, timeout=timeout_s)

    async def fetch(
        self, client: httpx.AsyncClient, address: str, role: PeerRole, deadline_s: float
    ) -> str:
        """Fetch the metrics page at ``address`` (host:port). The process there must have ``role``
        in its certificate.

        Raises httpx.HTTPError, TimeoutError.
        """
        if self._tls is not None:
            # Reload the certificate files for new connections.
            self._tls.get()
        # Certificates name a role, not a host.
        named = {"sni_hostname": role_name(role)}
        async with asyncio.timeout(deadline_s):
            answer = await client.get(f"{self.scheme}://{address}/metrics", extensions=named)
        answer.raise_for_status()
        return answer.text
