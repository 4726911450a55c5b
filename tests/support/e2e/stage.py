"""A small real cluster with the console in front: workers, Redis, router and uvicorn, one loop."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from baton.config.access import KeyConfig
from baton.security.tls import client_context, server_context
from router.access.access import Access
from router.console.api import ConsoleApi
from router.console.what_if import WhatIfProgram
from router.core.served_model import ServedModel
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.router.front_fakes import create_app, plain_client, serve

DEADLINE_S = 60.0
WHAT_IF = (sys.executable, "-P", "-m", "planning.what_if")
MODEL = "tiny"


@dataclass
class Stage:
    """What the tests act on."""

    cluster: MiniCluster
    console: ConsoleApi
    url: str

    async def ask(
        self,
        numbers: Iterable[int],
        prompt: str = "Once upon a time",
        key: str = "",
        **more: object,
    ) -> None:
        """A request for each number, one after another; with an API key if there is one."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True} | more
        tls = self.cluster.config.tls.front_client
        client = (
            plain_client(base_url=self.url, timeout=DEADLINE_S)
            if tls is None
            else httpx.AsyncClient(
                base_url=self.url,
                timeout=DEADLINE_S,
                verify=client_context(tls),
                trust_env=False,
            )
        )
        async with client:
            for number in numbers:
                answer = await client.post(
                    "/v1/completions",
                    json=body | {"prompt": f"{number} {prompt}"},
                    headers=headers,
                )
                assert answer.status_code == 200, answer.text


def admin(key: str) -> KeyConfig:
    """The entry of an operator's key."""
    return KeyConfig(
        name=key,
        tenant="default",
        sha256=hashlib.sha256(key.encode()).hexdigest(),
        scopes=("admin", "inference", "metrics"),
    )


@asynccontextmanager
async def console_stage(model: Path, redis_url: str, **config: Any) -> AsyncIterator[Stage]:
    """One prefill and one decode worker. ``config`` as for ``mini_cluster``."""
    async with mini_cluster(model, redis_url, heartbeat_s=0.2, **config) as cluster:
        access = Access(cluster.config, cluster.metrics)
        console = ConsoleApi(
            cluster.dispatcher,
            cluster.stats,
            cluster.config,
            MODEL,
            access,
            WhatIfProgram(WHAT_IF),
        )
        app = create_app(
            cluster.dispatcher,
            cluster.tokenizer,
            ServedModel(MODEL, 0, 512, 16),
            cluster.stats,
            cluster.config,
            access,
            more=(console,),
        )
        files = cluster.config.tls.fronts
        context = None if files is None else server_context(files)
        async with serve(app, context=context) as address:
            try:
                scheme = "http" if files is None else "https"
                yield Stage(cluster, console, f"{scheme}://{address}")
            finally:
                await console.close()
                await asyncio.sleep(0)
