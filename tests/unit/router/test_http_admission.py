"""Deadlines, priorities and keys over HTTP and gRPC."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import grpc.aio
import pytest

from baton import errors
from baton.security.cluster_secret import cache_salt
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.core.request import GenerationRequest
from tests.support.router.front_fakes import make_front
from tests.support.router.grpc_inference import Request, refused, serve
from tests.support.router.http_app import CHAT, HELLO, PLAIN, PROMPT, call, check_error, post

KEYS = [
    {
        "name": "batch",
        "tenant": "acme",
        "priority": 7,
        "sha256": hashlib.sha256(b"a-key").hexdigest(),
    }
]
TENANTS = [{"name": "acme", "weight": 2.0}]
JSON = {"content-type": "application/json"}
SHOWN = {"authorization": "Bearer a-key"}


def refusing(error: errors.BatonError) -> Any:
    async def script(request: GenerationRequest) -> Any:
        raise error
        yield

    return script


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (PLAIN, PROMPT)])
async def test_a_deadline(path: str, body: dict[str, Any]) -> None:
    front = make_front()
    response = await post(front, path, body, headers={"x-baton-deadline-ms": "1500"})
    assert response.status_code == 200
    (request,) = front.dispatcher.requests
    assert request.own_deadline
    assert 0 < request.deadline_s <= 1.5
    await post(front, path, body)
    assert not front.dispatcher.requests[-1].own_deadline
    assert 290 < front.dispatcher.requests[-1].deadline_s <= 300
    await post(front, path, body, headers={"x-baton-deadline-ms": "999999999999"})
    assert front.dispatcher.requests[-1].deadline_s <= 300


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "1e3", "²", "9" * 13])
async def test_a_deadline_that_is_none(value: str) -> None:
    front = make_front()
    header = {"x-baton-deadline-ms": value.encode("latin-1")}
    response = await post(front, CHAT, HELLO, headers=header)
    check_error(response, 400, "x-baton-deadline-ms")
    assert front.requests() == {("unknown", "error", "invalid_value"): 1}


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("value", [-3, 0, 5, 7.0, (1 << 31) - 1, -(1 << 31)])
async def test_a_priority(path: str, value: float) -> None:
    front = make_front()
    body = {**(HELLO if path == CHAT else PROMPT), "priority": value}
    assert (await post(front, path, body)).status_code == 200
    assert front.dispatcher.requests[-1].priority == value


@pytest.mark.parametrize("value", ["1", 1.5, True, [], 1 << 31, -(1 << 31) - 1])
async def test_a_priority_that_is_none(value: Any) -> None:
    response = await post(make_front(), CHAT, {**HELLO, "priority": value})
    check_error(response, 400, "priority")


@pytest.mark.parametrize("path", [CHAT, PLAIN, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("body", [b"[" * 20_000, b'{"prompt": "' + b"word " * 20_000])
async def test_a_full_queue_refuses_a_body_that_is_not_parsed(path: str, body: bytes) -> None:
    front = make_front(keys=KEYS, tenants=TENANTS)
    front.dispatcher.is_full = True
    response = await call(front, "POST", path, content=body, headers=SHOWN | JSON)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert front.dispatcher.asked == [("acme", 7)]
    assert front.requests() == {("unknown", "shed", "overloaded"): 1}


async def test_a_request_with_a_priority_is_read_before_a_full_queue_refuses_it() -> None:
    """It may push another one out of the queue."""
    front = make_front()
    front.dispatcher.is_full = True
    assert (await post(front, CHAT, {**HELLO, "priority": -5})).status_code == 200
    assert front.dispatcher.asked == []


async def test_a_full_queue_refuses_over_grpc_before_the_prompt_is_read() -> None:
    front = make_front()
    front.dispatcher.is_full = True
    # Its model is not served here, which is found later.
    error = await refused(front, Request(model="another", prompt="Hello", priority=-5))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert front.dispatcher.asked == [("default", -5)]


async def test_a_keys_tenant_and_priority() -> None:
    front = make_front(keys=KEYS, tenants=TENANTS)
    for headers, extra in ((SHOWN, {}), (SHOWN, {"priority": 1}), ({}, {})):
        response = await post(front, CHAT, {**HELLO, **extra}, headers=headers)
        assert response.status_code == 200
    mine, given, nobodys = front.dispatcher.requests
    assert (mine.principal.tenant, mine.principal.key_id) == ("acme", "batch")
    assert (mine.priority, given.priority, nobodys.priority) == (7, 1, 0)
    assert nobodys.principal.tenant == "default"
    # No tenant finds what another one has cached.
    assert (mine.cache_salt, nobodys.cache_salt) == (
        cache_salt("", "acme"),
        cache_salt("", "default"),
    )


@pytest.mark.parametrize("path", [CHAT, PLAIN])
async def test_a_required_key(path: str) -> None:
    front = make_front(keys=KEYS, tenants=TENANTS, require_key=True)
    body = HELLO if path == CHAT else PROMPT
    for headers in ({}, {"authorization": "Bearer nonsense"}):
        response = await post(front, path, body, headers=headers)
        error = check_error(response, 401)
        assert error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "nonsense" not in response.text
    assert front.requests() == {("unknown", "error", "invalid_api_key"): 2}
    for models in ("/v1/models", "/v1/models/tiny"):
        check_error(await call(front, "GET", models), 401)
        assert (await call(front, "GET", models, headers=SHOWN)).status_code == 200
    assert (await post(front, path, body, headers=SHOWN)).status_code == 200
    assert (await call(front, "GET", "/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_says_when_to_come_back(stream: bool) -> None:
    error = errors.DeadlineUnreachable("too much to do", retry_after=1.234)
    front = make_front(refusing(error))
    response = await post(front, CHAT, {**HELLO, "stream": stream})
    assert check_error(response, 429)["code"] == "deadline_unreachable"
    assert response.headers["retry-after"] == "2"
    assert response.headers["retry-after-ms"] == "1234"
    assert front.requests() == {("short", "shed", "deadline_unreachable"): 1}


async def test_slos_of_classes() -> None:
    classes = [{"name": "short", "max_tokens": 8, "slo_ttft_s": 1e-9}, {"name": "long"}]
    front = make_front(classes=classes)
    await post(front, PLAIN, {**PROMPT, "prompt": [5]})
    await post(front, PLAIN, {**PROMPT, "prompt": [5] * 20})
    assert front.count("goodput_requests_total", **{"class": "short"}) == 0
    assert front.count("goodput_requests_total", **{"class": "long"}) == 1


async def test_grpc() -> None:
    front = make_front(keys=KEYS, tenants=TENANTS, require_key=True)
    shown = (("authorization", "Bearer a-key"),)
    async with serve(front) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for request, metadata in (
            (Request(prompt="Hello"), shown),
            (Request(prompt="Hello", priority=0), (*shown, ("x-baton-deadline-ms", "1500"))),
        ):
            call_ = stub.Generate(request, timeout=20, metadata=metadata)
            assert [response async for response in call_]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20, metadata=shown)
    first, second = front.dispatcher.requests
    assert (first.principal.tenant, first.priority, first.own_deadline) == ("acme", 7, True)
    # gRPC rounds timeouts up on the wire, by up to a hundredth.
    assert 1.5 < first.deadline_s <= 20 * 1.01
    assert (second.priority, second.own_deadline) == (0, True)
    assert second.deadline_s <= 1.5
    error = await refused(front, Request(prompt="Hello"))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
