"""Fetches /metrics pages of workers and the supervisor, by TLS if the cluster has certificates."""

from __future__ import annotations

import asyncio

import httpx

from baton.security.tls import LiveContext, PeerRole, TlsFiles, client_context, role_name


class MetricsPages:
    """How this router fetches pages. Owned by its event loop."""

    def __init__(self, files: TlsFiles | None) -> None:
        """``files``: the router's certificate, if other processes require one. Raises ConfigError
        if it cannot be used."""
        self._tls = None if files is None else LiveContext(client_context(files), files)
        self.scheme = "http" if files is None else "https"

    def client(self, timeout_s: float) -> httpx.AsyncClient:
        """A client with connections of its own; it goes through no proxy."""
        # Without certificates there are none to load: workers speak plain HTTP.
        verify = False if self._tls is None else self._tls.get()
        return httpx.AsyncClient(trust_env=False, verify=verify, timeout=timeout_s)

    async def fetch(
        self, client: httpx.AsyncClient, address: str, role: PeerRole, deadline_s: float
    ) -> str:
        """The page at ``address`` (host:port), of a process with ``role`` in its certificate.

        Raises httpx.HTTPError, TimeoutError.
        """
        if self._tls is not None:
            # New connections show what the files hold now.
            self._tls.get()
        # A certificate names a role, wherever its machine is.
        named = {"sni_hostname": role_name(role)}
        async with asyncio.timeout(deadline_s):
            answer = await client.get(f"{self.scheme}://{address}/metrics", extensions=named)
        answer.raise_for_status()
        return answer.text
