from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx

from baton.config.cluster import Config
from baton.config.tls import TlsConfig
from router.listeners import Apps, HttpServers
from tests.support.certificates import Authority
from tests.support.mini_cluster import free_port

DEADLINE_S = 15.0
"""Less than TLS would wait for the end of a connection whose client says nothing."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


async def answers(config: Config, trusted: ssl.SSLContext | bool, *urls: str) -> list[str]:
    """What each URL answers while both listeners serve."""
    servers = HttpServers(Apps(app, app, ()), config)
    servers.start()
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
        try:
            return [(await client.get(url)).text for url in urls]
        finally:
            # The client's connections are still open: a listener waits for none that is idle.
            async with asyncio.timeout(DEADLINE_S):
                await servers.close()


async def test_both_listeners_use_the_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    http, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = Config(http=http, admin_http=admin, tls=TlsConfig(folder=str(authority.folder)))
    trusted = ssl.create_default_context(cafile=authority.certificate)
    urls = f"https://{http}/", f"https://{admin}/"
    assert await answers(config, trusted, *urls) == ["https", "https"]


async def test_without_a_certificate_they_speak_http() -> None:
    http, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = Config(http=http, admin_http=admin)
    assert await answers(config, False, f"http://{http}/") == ["http"]
