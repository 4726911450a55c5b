"""POST /v1/embeddings on a scripted cluster: shapes, limits and errors."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from baton.config.access import KeyConfig
from baton.errors import Overloaded
from baton.request import FinishReason
from router.core.request import GenerationRequest, OutputDelta
from router.embeddings.api import AT_ONCE, shortened
from tests.support.router.front_fakes import CONTEXT, MODEL, make_front
from tests.support.router.http_app import check_error, post

PATH = "/v1/embeddings"
SIZE = MODEL.embedding_size


def vector_of(ids: tuple[int, ...]) -> tuple[float, ...]:
    """Another one for other tokens: fp32 [SIZE], of length 1."""
    raw = [1.0 + sum(ids) % (7 + n) for n in range(SIZE)]
    length = math.sqrt(sum(number * number for number in raw))
    return struct.unpack(f"<{SIZE}f", struct.pack(f"<{SIZE}f", *(n / length for n in raw)))


async def embedding(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    assert request.embeds
    assert request.sampling.max_tokens == 1
    await asyncio.sleep(0)
    vector = vector_of(request.prompt_ids)
    yield OutputDelta("", (), FinishReason.LENGTH, 1, embedding=vector)


def asked(given: object, **more: object) -> dict[str, Any]:
    return {"model": "tiny", "input": given, **more}


@pytest.mark.parametrize(
    "given", ["hello", ["hello", "Grüße", "hello"], [5, 6, 7], [[5, 6, 7], [8]]]
)
async def test_each_input_has_its_vector(given: Any) -> None:
    front = make_front(embedding)
    response = await post(front, PATH, asked(given))
    assert response.status_code == 200, response.text
    body = response.json()
    CreateEmbeddingResponse.model_validate(body, strict=True)
    rows = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    ids = [front.tokenizer.encode(row) if isinstance(row, str) else tuple(row) for row in rows]
    assert body == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": n, "embedding": list(vector_of(row))}
            for n, row in enumerate(ids)
        ],
        "model": "tiny",
        "usage": dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, ids))),
        "system_fingerprint": None,
    }
    assert {(code, outcome) for _, outcome, code in front.requests()} == {("", "ok")}


async def test_only_the_end_of_each_input_is_taken_and_its_priority() -> None:
    front = make_front(embedding)
    more = {"truncate_prompt_tokens": 2, "priority": -3}
    assert (await post(front, PATH, asked([[5, 6, 7], [8]], **more))).status_code == 200
    assert [one.prompt_ids for one in front.dispatcher.requests] == [(6, 7), (8,)]
    assert {one.priority for one in front.dispatcher.requests} == {-3}


async def test_base64_is_the_same_numbers() -> None:
    front = make_front(embedding)
    plain = (await post(front, PATH, asked(["a", "b"], encoding_format="float"))).json()
    coded = (await post(front, PATH, asked(["a", "b"], encoding_format="base64"))).json()
    for one, other in zip(plain["data"], coded["data"], strict=True):
        raw = base64.b64decode(other["embedding"], validate=True)
        assert list(struct.unpack(f"<{SIZE}f", raw)) == one["embedding"]


async def test_dimensions_are_the_leading_ones_at_length_one() -> None:
    front = make_front(embedding)
    whole = (await post(front, PATH, asked([4, 9]))).json()["data"][0]["embedding"]
    short = (await post(front, PATH, asked([4, 9], dimensions=3))).json()["data"][0]["embedding"]
    assert len(short) == 3
    assert math.fsum(n * n for n in short) == pytest.approx(1, abs=1e-6)
    assert short[1] / short[0] == pytest.approx(whole[1] / whole[0], rel=1e-6)
    same = (await post(front, PATH, asked([4, 9], dimensions=SIZE))).json()
    assert same["data"][0]["embedding"] == whole
    assert shortened((0.0, 0.0, 1.0), 2).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "tiny"}, "input"),
        (asked(""), "input"),
        (asked([]), "input"),
        (asked(["a", ""]), "input"),
        (asked([[]]), "input"),
        (asked(5), "input"),
        (asked([5, "a"]), "input"),
        (asked([-1]), "input"),
        (asked([10**6]), "input"),
        (asked(["a"] * 2049), "input"),
        (asked([5] * CONTEXT), "input"),
        (asked("a" * 3000), "input"),
        (asked("a", encoding_format="int8"), "encoding_format"),
        (asked("a", dimensions=0), "dimensions"),
        (asked("a", dimensions=SIZE + 1), "dimensions"),
        (asked("a", dimensions="3"), "dimensions"),
    ],
)
async def test_bad_requests(body: dict[str, Any], param: str) -> None:
    front = make_front(embedding)
    check_error(await post(front, PATH, body), 400, param)
    assert not front.dispatcher.requests


async def test_the_longest_input_fits() -> None:
    response = await post(make_front(embedding), PATH, asked([5] * (CONTEXT - 1)))
    assert response.json()["usage"]["prompt_tokens"] == CONTEXT - 1


async def test_unknown_models_and_keys() -> None:
    check_error(await post(make_front(), PATH, {"model": "other", "input": "a"}), 404, "model")
    keys = (KeyConfig(name="ann", tenant="default", sha256=hashlib.sha256(b"secret").hexdigest()),)
    front = make_front(embedding, keys=keys, require_key=True)
    check_error(await post(front, PATH, asked("a")), 401)
    right = {"authorization": "Bearer secret"}
    assert (await post(front, PATH, asked("a"), headers=right)).status_code == 200


async def test_one_refused_input_ends_all() -> None:
    async def second_refused(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        if request.prompt_ids == (9,):
            raise Overloaded("no room", retry_after=2.0)
        async for delta in embedding(request):
            yield delta

    response = await post(make_front(second_refused), PATH, asked([[5], [9]]))
    check_error(response, 429)
    assert response.headers["retry-after"] == "2"


async def test_only_some_inputs_run_at_a_time() -> None:
    running, most = 0, 0

    async def counted(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        async for delta in embedding(request):
            yield delta

    body = (await post(make_front(counted), PATH, asked([[5]] * 100))).json()
    assert [one["index"] for one in body["data"]] == list(range(100))
    assert 1 < most <= AT_ONCE


async def test_the_deadline_is_that_of_all_inputs() -> None:
    async def silent(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        await asyncio.Event().wait()
        yield OutputDelta("", (), None)

    front = make_front(silent)
    headers = {"x-baton-deadline-ms": "100"}
    response = await post(front, PATH, asked([[5]] * 2 * AT_ONCE), headers=headers)
    assert response.status_code in (429, 503, 504), response.text
    assert response.json()["error"]["code"] == "deadline_exceeded"
