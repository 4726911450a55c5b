"""``GET /v1/requests/{id}``: ended requests by the ids that clients see."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from baton.errors import Overloaded
from router.access.access import Access
from router.admin import request_api
from router.admin.request_api import RequestApi, answer_router
from router.admin.router_questions import Answers, RouterQuestions
from router.core.request_history import MAX_FOUND, EndedRequest, RequestHistory
from router.core.timeline import AttemptRecord, Timeline
from tests.support.router.front_fakes import (
    MODEL,
    Front,
    create_app,
    make_front,
    plain_client,
    serve,
)

BODY = {"model": MODEL.id, "prompt": "Hi", "max_tokens": 4}


class Others:
    """The other routers, which give these answers."""

    def __init__(self, *texts: bytes, others: int | None = 0) -> None:
        self.answers = Answers(texts, others)
        self.asked: list[str] = []

    async def ask(self, question: str) -> Answers:
        self.asked.append(question)
        return self.answers


ALONE = Others()


@asynccontextmanager
async def client_of(front: Front, others: Others = ALONE) -> AsyncIterator[httpx.AsyncClient]:
    access = Access(front.config, front.metrics)
    api = RequestApi(front.stats.history, access, cast(RouterQuestions, others), "router-1@here")
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
    assert (told["object"], told["answered"], told["routers"]) == ("list", 1, 1)
    data: list[dict[str, Any]] = told["data"]
    return data


def record(request_id: str, call_id: str = "", *, ended_at: float = 1.0) -> EndedRequest:
    timeline = Timeline()
    timeline.received_at, timeline.first_at, timeline.second_at = 1.0, 1.5, 1.6
    attempt = AttemptRecord(0, 1.1, "prefill-0", "decode-1", "prefix")
    attempt.is_told, attempt.steps_s = True, 0.25
    timeline.begin(attempt)
    return EndedRequest(
        request_id=request_id,
        call_id=call_id,
        trace_id="",
        tenant="acme",
        key_id="key",
        context_class="short",
        outcome="ok",
        code="",
        ended_at=ended_at,
        took_s=2.0,
        prompt_tokens=3,
        cached_tokens=0,
        output_tokens=4,
        choices=1,
        slo_ttft_s=2.0,
        timeline=timeline,
    )


def of(*records: EndedRequest) -> RequestHistory:
    history = RequestHistory()
    for one in records:
        history.add(one)
    return history


async def test_a_request_is_found_by_both_ids() -> None:
    async with client_of(make_front()) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine.7"})
        assert answer.status_code == 200, answer.text
        (one,) = await found(client, answer.json()["id"])
        assert await found(client, "mine.7") == [one]
        assert await found(client, one["id"]) == [one]
        assert one["request_id"] == "mine.7"
        assert one["router"] == "router-1@here"
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


async def test_requests_of_other_routers_are_shown_next_to_its_own() -> None:
    """All in order of their end, as the router shows them that served them."""
    other = of(record("cmpl-a", "mine", ended_at=5.0), record("cmpl-b", "mine", ended_at=9e9))
    others = Others(answer_router(other, "router-0@there", "mine"), b"[]", others=3)
    front = make_front()
    front.stats.history.add(record("cmpl-c", "mine", ended_at=7.0))
    async with client_of(front, others) as client:
        told = (await client.get("/v1/requests/mine")).json()
    assert [(one["id"], one["router"]) for one in told["data"]] == [
        ("cmpl-b", "router-0@there"),
        ("cmpl-c", "router-1@here"),
        ("cmpl-a", "router-0@there"),
    ]
    assert (told["answered"], told["routers"]) == (3, 4)
    assert others.asked == ["mine"]
    first, second, _ = told["data"]
    differing = {"id", "router", "ended_at"}
    assert {k: v for k, v in first.items() if k not in differing} == {
        k: v for k, v in second.items() if k not in differing
    }
    assert first["class"] == "short"
    assert first["attempts"][0]["compute_ms"] == 250.0


async def test_what_another_version_says_counts_as_no_answer() -> None:
    (told,) = json.loads(answer_router(of(record("a")), "router-0@there", "a"))
    more = json.dumps([told | {"news": 1}]).encode()
    del told["took_ms"]
    others = Others(more, json.dumps([told]).encode(), b"?", b"", others=4)
    async with client_of(make_front(), others) as client:
        answer = (await client.get("/v1/requests/a")).json()
    assert len(answer["data"]) == 1
    assert (answer["answered"], answer["routers"]) == (2, 5)


async def test_without_the_store_a_router_tells_its_own() -> None:
    front = make_front()
    front.stats.history.add(record("cmpl-a"))
    async with client_of(front, Others(others=None)) as client:
        told = (await client.get("/v1/requests/cmpl-a")).json()
    assert [one["id"] for one in told["data"]] == ["cmpl-a"]
    assert (told["answered"], told["routers"]) == (1, None)


async def test_too_many_questions_at_a_time_are_refused() -> None:
    class Busy(Others):
        async def ask(self, question: str) -> Answers:
            raise Overloaded("try again", retry_after=3.0)

    async with client_of(make_front(), Busy()) as client:
        answer = await client.get("/v1/requests/cmpl-a")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("name", ["a b", "%C3%A4", "a" * 161, "a;b"])
async def test_what_is_no_id_asks_no_router(name: str) -> None:
    others = Others()
    async with client_of(make_front(), others) as client:
        answer = await client.get(f"/v1/requests/{name}")
        assert answer.status_code == 400
        assert "1 to 160 characters" in answer.json()["error"]["message"]
    assert others.asked == []


def _ids(text: bytes) -> Sequence[str]:
    return [one["id"] for one in json.loads(text)]


def test_an_answer_to_a_router_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    history = of(*(record(f"cmpl-{number}", "same") for number in range(9)))
    one = len(answer_router(of(record("cmpl-8", "same")), "r", "same"))
    for size, expected in ((one, 1), (one - 1, 0), (3 * one, 3)):
        monkeypatch.setattr(request_api, "MAX_ANSWER_BYTES", size)
        text = answer_router(history, "r", "same")
        assert len(text) <= size
        assert _ids(text) == [f"cmpl-{8 - back}" for back in range(expected)]


async def test_the_number_of_requests_is_bounded() -> None:
    history = of(*(record(f"cmpl-{number}", "same") for number in range(MAX_FOUND)))
    text = answer_router(history, "r", "same")
    assert len(_ids(text)) == MAX_FOUND, "all fit with one attempt each"
    front = make_front()
    front.stats.history.add(replace(record("mine", "same"), ended_at=2.0))
    async with client_of(front, Others(text, others=1)) as client:
        data = (await client.get("/v1/requests/same")).json()["data"]
    assert len(data) == MAX_FOUND
    assert data[0]["id"] == "mine"


async def test_only_operators_may_ask() -> None:
    keys = [
        {
            "name": "one",
            "tenant": "default",
            "sha256": hashlib.sha256(b"one").hexdigest(),
            "scopes": ["inference"],
        },
    ]
    others = Others()
    async with client_of(make_front(keys=keys, require_key=True), others) as client:
        assert (await client.get("/v1/requests/r")).status_code == 401
        shown = {"authorization": "Bearer one"}
        assert (await client.get("/v1/requests/r", headers=shown)).status_code == 403
    assert others.asked == []
