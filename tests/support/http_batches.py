"""Batches over HTTP, as any client of the API runs them."""

from __future__ import annotations

from typing import Any

import httpx

from router.batches.storage.batch import UNFINISHED


async def begin_batch(http: httpx.AsyncClient, content: bytes, endpoint: str) -> dict[str, Any]:
    """Upload a file of lines, and start a batch of it."""
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": content}}
    file = (await http.post("/v1/files", **form)).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch: dict[str, Any] = (await http.post("/v1/batches", json=body)).raise_for_status().json()
    return batch


async def read_batch(http: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as it is now."""
    answer = await http.get(f"/v1/batches/{batch['id']}")
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def output_of(http: httpx.AsyncClient, batch: dict[str, Any]) -> str:
    """The contents of the output file."""
    answer = await http.get(f"/v1/files/{batch['output_file_id']}/content")
    return answer.raise_for_status().text


def has_ended(batch: dict[str, Any]) -> bool:
    return batch["status"] not in UNFINISHED
