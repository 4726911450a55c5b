"""The fuzzers' bodies: of every endpoint, with values for every field, and served."""

from __future__ import annotations

import random
from collections import Counter

import httpx
import pytest

from router.batches.line import BadLine, read_line
from tests.fuzz.bodies import BODIES, batch_file, plausible_body, values_of
from tests.fuzz.openapi import never_served
from tests.fuzz.targets import TARGETS, plain_paths
from tests.support.router.front_fakes import make_front
from tests.support.router.http_app import post
from tests.support.router.whole_router import fronts

_OF_THE_FLEET = ("/v1/workers/", "/v1/pools/")
"""Not asked with success: they end or move the workers that are to answer."""


async def test_every_endpoint_with_a_body_is_asked() -> None:
    async with fronts(keys=(), require_key=False) as there:
        transport = httpx.ASGITransport(there.apps.http)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            told = (await client.get("/openapi.json")).json()["paths"]
    posts = {
        path
        for path, operations in told.items()
        if "application/json"
        in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert {path for path in posts if not path.startswith(_OF_THE_FLEET)} == set(BODIES)


@pytest.mark.parametrize("path", BODIES)
def test_every_field_has_values(path: str) -> None:
    lacking = [
        name for name in BODIES[path].model_fields if name != "model" and not values_of(path, name)
    ]
    assert lacking == []


@pytest.mark.parametrize("path", plain_paths())
async def test_bodies_are_served(path: str) -> None:
    """Not all: some fields exclude one another, and some values are meant to be refused."""
    front = make_front()
    statuses: Counter[int] = Counter()
    for number in range(20):
        body = plausible_body(random.Random(number), path, "tiny")
        statuses[(await post(front, path, body)).status_code] += 1
    assert statuses[200] >= 7, statuses
    assert set(statuses) <= {200, 400, 429}


def test_most_lines_of_batch_files_are_valid() -> None:
    counts: Counter[bool] = Counter()
    for number in range(20):
        for line in filter(None, batch_file(random.Random(number), "tiny").splitlines()):
            try:
                counts[read_line(1, line, 1 << 20).number == 1] += 1
            except BadLine:
                counts[False] += 1
    assert counts[True] > 10 * counts[False] > 0, counts


def test_operations_that_were_never_served_are_reported() -> None:
    answers = {"GET /a": {"200": 1, "404": 2}, "POST /b": {"400": 9}, "POST /c": {"201": 1}}
    assert never_served(answers) == ["POST /b"]
    assert never_served({"POST /v1/files": {"400": 2}}) == ["POST /v1/files"]
    assert never_served({"POST /v1/batches/{batch_id}/cancel": {"400": 2}}) == []


def test_the_seeds_ask_every_plain_path() -> None:
    first = {seed[0] for seed in TARGETS["http-body"].seeds()}
    assert first == set(range(len(plain_paths())))
