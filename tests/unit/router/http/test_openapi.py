"""The API's description says what its endpoints answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi.openapi.utils import get_openapi

from router.access.access import OPEN, Access
from router.admin.worker_api import ClusterApi, WorkerApi
from router.admin.worker_control import PoolScaling, WorkerControl
from router.batches.api import BatchesApi
from router.batches.batch_planner import BatchPlanner
from router.batches.service import BatchService
from router.console.api import ConsoleApi
from router.dispatch.dispatcher import ClusterDispatcher
from router.http import openapi
from tests.support.router.front_fakes import MODEL, create_app, make_front


def at(schema: dict[str, Any], pointer: str) -> Any:
    """What a reference within a document leads to (RFC 6901)."""
    place: Any = schema
    for part in pointer.removeprefix("#/").split("/"):
        place = place[part.replace("~1", "/").replace("~0", "~")]
    return place


def references(part: Any) -> Iterator[str]:
    """All that a document refers to."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name in ("$ref", "operationRef") and isinstance(value, str):
                yield value
            else:
                yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


async def test_nothing_refers_to_what_is_not_there(tmp_path: Path) -> None:
    front = make_front(data_dir=str(tmp_path))
    access = Access(front.config, front.metrics)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    # Of these only the endpoints are looked at.
    cluster = cast(ClusterDispatcher, SimpleNamespace(workers=SimpleNamespace(all=tuple)))
    more = (
        BatchesApi(cast(BatchService, None), cast(BatchPlanner, None), front.config),
        ConsoleApi(cluster, front.stats, front.config, "tiny", access),
        WorkerApi(cast(WorkerControl, None), cast(PoolScaling, None), access, front.config),
        ClusterApi("1f2e3d", "tiny", cast(WorkerControl, None), cast(PoolScaling, None), access),
    )
    transport = httpx.ASGITransport(create_app(*parts, more=more))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        schema = (await client.get("/openapi.json")).json()
    told = list(references(schema))
    assert "/v1/cluster" in schema["paths"]
    assert any(name.startswith("#/paths/~1v1~1files") for name in told)
    assert all(at(schema, name) for name in told)
    # One that may be left out has no name of its own.
    assert "Body" not in schema["components"]["schemas"]
    for path in ("/v1/batches", "/v1/files", "/console/what-if"):
        assert schema["paths"][path]["post"]["requestBody"]["required"], path


async def test_it_is_built_once_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def recorded(**about: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return get_openapi(**about)

    monkeypatch.setattr(openapi, "get_openapi", recorded)
    transport = httpx.ASGITransport(make_front().app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
    assert len({answer.content for answer in answers}) == 1
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_refusals_and_keys_are_described() -> None:
    transport = httpx.ASGITransport(make_front().app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        schema = (await client.get("/openapi.json")).json()
        pages = [(await client.get(path)).headers["content-type"] for path in ("/metrics",)]
    assert schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert {"4XX", "5XX"} <= operation["responses"].keys(), path
            assert "422" not in operation["responses"], path
            assert (operation.get("security") == [{"key": []}]) is (path not in OPEN), path
    for path in ("/v1/chat/completions", "/v1/messages", "/detokenize"):
        body = schema["paths"][path]["post"]["requestBody"]
        assert body["required"], path
        assert at(schema, body["content"]["application/json"]["schema"]["$ref"])["required"], path
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        answers = schema["paths"][path]["post"]["responses"]["200"]["content"]
        assert answers.keys() == {"application/json", "text/event-stream"}, path
    described = schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert all(page.split(";")[0] in described for page in pages)
