"""Shared by the tests of api and by other tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import openai

from router.access.access import Access
from tests.support.router.front_fakes import (
    MODEL,
    Front,
    batches_of,
    create_app,
    make_front,
    serve,
)

DEADLINE_S = 30.0


CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


@dataclass
class Served:
    """A front with batches behind a real server."""

    front: Front
    address: str

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        base = f"http://{self.address}/v1"
        return openai.AsyncOpenAI(
            base_url=base,
            api_key=key,
            max_retries=0,
            timeout=DEADLINE_S,
        )


@asynccontextmanager
async def served(
    folder: Path, front: Front | None = None, *, replicated: bool = False, **config: Any
) -> AsyncIterator[Served]:
    front = front or make_front(data_dir=str(folder), **config)
    access = Access(front.config, front.metrics)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    batches = batches_of(*parts, replicated=replicated)
    app = create_app(*parts, more=(batches.api,))
    await batches.start()
    async with serve(app) as address:
        try:
            yield Served(front, address)
        finally:
            await batches.stop()
            await batches.close()


def lines(bodies: Sequence[dict[str, Any]], url: str = CHAT) -> bytes:
    rows = [
        {"custom_id": f"c-{place}", "method": "POST", "url": url, "body": body}
        for place, body in enumerate(bodies)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def chat(content: str = "hello", **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {"model": "tiny", "messages": [message], "max_tokens": 8, **more}
