"""``GET /v1/requests/{id}``: ended requests by the ids that clients see."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.access.access import Access
from router.admin.request_api import RequestApi
from tests.support.router.front_fakes import (
    MODEL,
    Front,
    create_app,
    make_front,
    plain_client,
    serve,
)

BODY = {"model": MODEL.id, "prompt": "Hi", "max_tokens": 4}


@asynccontextmanager
async def client_of(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    access = Access(front.config, front.metrics)
    api = RequestApi(front.stats.history, access, number=1, routers=3)
    parts = front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access
    async with (
        serve(create_app(*parts, more=(api,))) as address,
        plain_client(base_url=f"http://{address}") as client,
    ):
        yield client


async def found(client: httpx.AsyncClient, name: str) -> list[dict[str, Any]]:
    answer = await client.get(f"/v1/requests/{name}")
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["object"], told["router"], told["routers"]) == ("list", 1, 3)
    data: list[dict[str, Any]] = told["data"]
    return data


async def test_a_request_is_found_by_both_ids() -> None:
    async with client_of(make_front()) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine.7"})
        assert answer.status_code == 200, answer.text
        (one,) = await found(client, answer.json()["id"])
        assert await found(client, "mine.7") == [one]
        assert await found(client, one["id"]) == [one]
        assert one["request_id"] == "mine.7"
        assert (one["outcome"], one["code"], one["tenant"]) == ("ok", "", "default")
        assert sum(one["ttft_parts_ms"].values()) == pytest.approx(one["ttft_ms"])
        assert one["attempts"] == [], "the dispatcher is a fake"
        assert await found(client, "another") == []


async def test_a_call_without_an_id_has_the_one_of_its_answer() -> None:
    async with client_of(make_front()) as client:
        answer = await client.post("/v1/completions", json=BODY)
        (one,) = await found(client, answer.headers["x-request-id"])
        assert one["id"].startswith(answer.json()["id"])


async def test_every_prompt_is_shown() -> None:
    async with client_of(make_front()) as client:
        answer = await client.post("/v1/completions", json=BODY | {"prompt": ["a", "b", "c"]})
        assert len(await found(client, answer.json()["id"])) == 3


async def test_only_operators_may_ask() -> None:
    keys = [
        {
            "name": "one",
            "tenant": "default",
            "sha256": hashlib.sha256(b"one").hexdigest(),
            "scopes": ["inference"],
        },
    ]
    async with client_of(make_front(keys=keys, require_key=True)) as client:
        assert (await client.get("/v1/requests/r")).status_code == 401
        shown = {"authorization": "Bearer one"}
        assert (await client.get("/v1/requests/r", headers=shown)).status_code == 403
