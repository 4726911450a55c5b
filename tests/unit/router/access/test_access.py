"""Access control of both listeners: no endpoint answers without the key that it requires."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # type: ignore[import-untyped]
    ProtoReflectionDescriptorDatabase,
)

from baton.config.choices import Scope
from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.access.access import listed_scope, scope_of_path, scope_of_service
from tests.support.router.access_access import bearer
from tests.support.router.front_fakes import make_front, plain_client, serve
from tests.support.router.whole_router import KEYS, fronts

DEADLINE_S = 60.0


SERVICES: dict[str, Scope | None] = {
    "baton.v1.InferenceService": "inference",
    "baton.v1.OperatorService": "admin",
    "baton.v1.TokenService": "inference",
    "baton.v1.WorkerOperatorService": "admin",
    "grpc.health.v1.Health": None,
    "grpc.reflection.v1alpha.ServerReflection": "inference",
}
"""All services of the gRPC listener, and the scope that each takes."""
OPENS: dict[Scope, str] = {"inference": "asks", "metrics": "reads", "admin": "rules"}


async def test_every_path_takes_its_key() -> None:
    async with fronts() as there:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(there.apps.http), base_url="http://127.0.0.1"
        )
        assert len(there.apps.paths) > 30
        for method, path in there.apps.paths:
            if scope_of_path(path) is None:
                assert (await client.request(method, path)).status_code != 401, path
                continue
            assert listed_scope(path) is not None, (
                f"{path} is not listed in router/access/access.py"
            )
            filled = path.replace("{", "").replace("}", "")
            needed = scope_of_path(filled)
            assert needed is not None
            for secret, status in (("", 401), ("wrong", 401), (OPENS[needed], None)):
                answer = await client.request(method, filled, headers=bearer(secret))
                if status is None:
                    assert answer.status_code not in (401, 403), (method, path)
                else:
                    assert answer.status_code == status, (method, path, secret)
            for secret, allowed in (("asks", "inference"), ("reads", "metrics")):
                if needed != allowed:
                    answer = await client.request(method, filled, headers=bearer(secret))
                    assert answer.status_code == 403, (method, path, secret)
        await client.aclose()


@pytest.mark.parametrize(
    ("scope", "paths"),
    [
        ("inference", "/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/models"),
        ("inference", "/v1/embeddings /v1/files /v1/batches/batch-1/cancel /tokenize /detokenize"),
        ("inference", "/v1/generate /v1/generate/batch /v1/model/info /version"),
        ("metrics", "/metrics /metrics/summary /load /console/events"),
        (
            "admin",
            "/v1/workers /v1/workers/decode-0/drain /v1/pools/decode /v1/cluster /v1/requests/r",
        ),
        ("admin", "/v1/cache /v1/cache/stats"),
        (None, "/health /live /ping /console /console/static/console.js"),
    ],
)
def test_the_scopes_of_the_paths(scope: str | None, paths: str) -> None:
    """Written out: what the table of paths says is not asked of the table."""
    assert {path: scope_of_path(path) for path in paths.split()} == dict.fromkeys(
        paths.split(), scope
    )


async def test_what_is_not_listed_takes_an_admins_key() -> None:
    assert scope_of_path("/new") == "admin"
    assert scope_of_path("/v1/completionsx") == "admin"
    assert scope_of_path("/v1/files/file-1/content") == "inference"
    assert scope_of_path("/health") is None
    assert scope_of_path("/health/x") == "admin"
    assert scope_of_service("baton.v1.NewService") == "admin"
    async with fronts() as there:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(there.apps.http), base_url="http://127.0.0.1"
        )
        assert (await client.get("/new")).status_code == 401
        assert (await client.get("/new", headers=bearer("rules"))).status_code == 404
        await client.aclose()


async def test_every_grpc_method_takes_its_key() -> None:
    async with fronts() as there:
        credentials = (("authorization", "Bearer asks"),)
        services = await asyncio.to_thread(_services, there.grpc, credentials)
        assert {name: scope_of_service(name) for name in services} == SERVICES
        methods = [
            (service, method.name, method.client_streaming, method.server_streaming)
            for service in services
            if service != "grpc.reflection.v1alpha.ServerReflection"
            for method in Default().FindServiceByName(service).methods
        ]
        methods.append(
            ("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", True, True)
        )
        assert len(methods) >= len(SERVICES)
        async with grpc.aio.insecure_channel(there.grpc) as channel:
            for service, name, streams_in, streams_out in methods:
                call = (channel, f"/{service}/{name}", streams_in, streams_out)
                needed = scope_of_service(service)
                if needed is None:
                    assert service == "grpc.health.v1.Health"
                    continue
                assert await _code(*call, "") is grpc.StatusCode.UNAUTHENTICATED, call
                assert await _code(*call, "wrong") is grpc.StatusCode.UNAUTHENTICATED, call
                if needed == "admin":
                    assert await _code(*call, "asks") is grpc.StatusCode.PERMISSION_DENIED, call
            unknown = (channel, "/baton.v1.NoService/No", False, False)
            assert await _code(*unknown, "") is grpc.StatusCode.UNAUTHENTICATED
            assert await _code(*unknown, "rules") is grpc.StatusCode.UNIMPLEMENTED
            health = (channel, "/grpc.health.v1.Health/Check", False, False)
            assert await _code(*health, "") is grpc.StatusCode.OK


def _services(address: str, credentials: tuple[tuple[str, str], ...]) -> list[str]:
    """As the server itself tells."""

    class WithKey(grpc.StreamStreamClientInterceptor):
        def intercept_stream_stream(self, proceed: Any, details: Any, requests: Any) -> Any:
            return proceed(details._replace(metadata=credentials), requests)

    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, WithKey()))
        return list(database.get_services())


async def _code(
    channel: grpc.aio.Channel, path: str, streams_in: bool, streams_out: bool, secret: str
) -> grpc.StatusCode:
    """How a call with an empty message ends, or with an open stream of none."""
    metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
    options: dict[str, Any] = {"metadata": metadata, "timeout": DEADLINE_S}
    kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
    method = getattr(channel, kind)(path)
    if streams_in:
        # Nothing is written: grpc.aio tells INTERNAL where a call ends amid a write.
        return grpc.StatusCode(await method(**options).code())
    call = method(b"", **options)
    try:
        if streams_out:
            async for _ in call:
                break
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_an_admin_listener_takes_the_operators_paths_away() -> None:
    async with fronts(admin_http="127.0.0.1:9") as there:
        assert there.apps.admin is not None
        clients = httpx.ASGITransport(there.apps.http), httpx.ASGITransport(there.apps.admin)
        async with (
            httpx.AsyncClient(transport=clients[0], base_url="http://127.0.0.1") as public,
            httpx.AsyncClient(transport=clients[1], base_url="http://127.0.0.1") as admin,
        ):
            for path in ("/metrics", "/v1/workers/decode-0/drain", "/console"):
                assert (await public.get(path, headers=bearer("rules"))).status_code == 404
                assert (await public.get(path)).status_code == 404
            assert (await admin.get("/metrics")).status_code == 401
            assert (await admin.get("/metrics", headers=bearer("reads"))).status_code == 200
            assert (await admin.get("/v1/models", headers=bearer("asks"))).status_code == 404
            assert (await public.get("/v1/models", headers=bearer("asks"))).status_code == 200
            for client in (public, admin):
                assert (await client.get("/live")).status_code == 200


async def test_an_admin_listener_takes_the_operators_calls_from_grpc() -> None:
    credentials = (("authorization", "Bearer rules"),)
    async with fronts(admin_http="127.0.0.1:9") as there:
        services = await asyncio.to_thread(_services, there.grpc, credentials)
        assert set(services) == {one for one, scope in SERVICES.items() if scope != "admin"}
        async with grpc.aio.insecure_channel(there.grpc) as channel:
            for method in ("OperatorService/DropCaches", "WorkerOperatorService/DrainWorker"):
                for secret, expected in (
                    ("", grpc.StatusCode.UNAUTHENTICATED),
                    ("rules", grpc.StatusCode.UNIMPLEMENTED),
                ):
                    code = await _code(channel, f"/baton.v1.{method}", False, False, secret)
                    assert code is expected, (method, secret)


OPERATORS_CALLS = (
    ("POST", "/v1/workers/decode-0/drain"),
    ("POST", "/v1/pools/decode/scale"),
    ("DELETE", "/v1/cache"),
    ("GET", "/v1/cluster"),
)


@pytest.mark.parametrize(
    "header", ["x-forwarded-for", "Forwarded", "Via", "X-Real-IP", "X-Forwarded-Proto"]
)
async def test_without_keys_no_operator_comes_through_a_proxy(header: str) -> None:
    """A reverse proxy on this machine would make all the world an operator."""
    body = {"count": 1}
    async with fronts(keys=(), require_key=False) as there:
        transport = httpx.ASGITransport(there.apps.http)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for method, path in OPERATORS_CALLS:
                direct = await client.request(method, path, json=body)
                assert direct.status_code not in (401, 403), (method, path)
                passed = await client.request(method, path, json=body, headers={header: "1"})
                assert passed.status_code == 403, (method, path)
                assert "baton keys create" in passed.json()["error"]["message"]
            answer = await client.get("/v1/models", headers={header: "1"})
            assert answer.status_code == 200, "inference is for all"
        async with grpc.aio.insecure_channel(there.grpc) as channel:
            call: Any = channel.unary_unary("/baton.v1.OperatorService/DropCaches")
            shown = ((header.lower(), "1"),)
            code = await call(b"", metadata=shown, timeout=DEADLINE_S).code()
            assert code is grpc.StatusCode.PERMISSION_DENIED
    async with fronts() as there:
        transport = httpx.ASGITransport(there.apps.http)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            shown_key = bearer("rules") | {header: "1"}
            answer = await client.get("/v1/cluster", headers=shown_key)
            assert answer.status_code not in (401, 403), "a key is enough"


async def test_operators_calls_and_refusals_are_in_the_audit_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fronts() as there:
        transport = httpx.ASGITransport(there.apps.http, client=("10.1.2.3", 4))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            path, named = "/v1/workers/decode-7/drain", {"x-request-id": "mine-1"}
            await client.post(path, headers=bearer("rules") | named)
            await client.post(path, headers=bearer("asks") | named)
            await client.get("/v1/models")
        async with grpc.aio.insecure_channel(there.grpc) as channel:
            for secret in ("rules", ""):
                metadata = (("authorization", f"Bearer {secret}"), ("x-request-id", "mine-2"))
                stub = control_pb2_grpc.WorkerOperatorServiceStub(channel)
                call = stub.ScalePool(
                    control_pb2.ScalePoolRequest(pool="nobody", count=2),
                    metadata=metadata,
                    timeout=DEADLINE_S,
                )
                await call.code()
    found = [json.loads(one.getMessage()) for one in caplog.records if one.name == "baton.audit"]
    drained, forbidden, unknown, scaled, stranger = found
    action = {"action": "drain", "object": "decode-7", "force": False}
    told = {"key": "rules", "result": "not_found", "request_id": "mine-1"}
    assert drained == action | told
    refused = {"action": f"POST {path}", "key": "asks", "client": "10.1.2.3"}
    assert forbidden == refused | {"result": "forbidden", "request_id": "mine-1"}
    assert (unknown["key"], unknown["result"]) == ("", "invalid_api_key")
    action = {"action": "scale", "object": "nobody", "count": 2, "force": False}
    assert scaled == action | told | {"request_id": "mine-2"}
    assert stranger["action"] == "/baton.v1.WorkerOperatorService/ScalePool"
    assert stranger["client"].startswith("ipv4:127.0.0.1:")


async def test_without_keys_nothing_is_asked_for_on_loopback() -> None:
    async with fronts(keys=(), require_key=False) as there:
        transport = httpx.ASGITransport(there.apps.http)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for path in ("/metrics", "/v1/models", "/openapi.json"):
                assert (await client.get(path)).status_code == 200


HOSTS = [
    ("127.0.0.1:8000", True),
    ("localhost", True),
    ("LOCALHOST.:8000", True),
    ("[::1]:8000", True),
    ("baton", True),
    ("tab.localhost:8000", True),
    ("10.1.2.3", True),
    ("evil.example", False),
    ("127.0.0.1.evil.example:8000", False),
    ("api.example.com", False),
]


@pytest.mark.parametrize(("host", "served"), HOSTS)
async def test_a_name_of_a_strangers_is_not_served_on_loopback(host: str, served: bool) -> None:
    front = make_front()
    async with serve(front.app()) as address, plain_client() as client:
        answer = await client.get(f"http://{address}/live", headers={"host": host})
        assert answer.status_code == (200 if served else 403)
        if not served:
            assert "allowed_hosts" in answer.json()["error"]["message"]


async def test_names_may_be_allowed_and_elsewhere_all_are() -> None:
    elsewhere = {"http": "0.0.0.0:8000"}
    named = elsewhere | {"allowed_hosts": ("a.example",)}
    for fields, host, path, status in (
        ({"allowed_hosts": ("api.example.com",)}, "api.example.com:443", "/live", 200),
        ({"allowed_hosts": ("api.example.com",)}, "127.0.0.1", "/live", 200),
        ({"allowed_hosts": ("api.example.com",)}, "other.example.com", "/live", 403),
        ({"allowed_hosts": ("*",)}, "other.example.com", "/live", 200),
        (elsewhere, "other.example.com", "/live", 200),
        (named, "127.0.0.1", "/openapi.json", 403),
        # A probe knows a pod's address alone.
        (named, "10.1.2.3:8000", "/live", 200),
    ):
        transport = httpx.ASGITransport(make_front(**fields).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.get(path, headers={"host": host})
            assert answer.status_code == status, (fields, host)


SITES: list[tuple[dict[str, str], bool]] = [
    ({}, True),
    ({"origin": "http://127.0.0.1:8000"}, True),
    ({"origin": "https://evil.example"}, False),
    ({"origin": "null"}, False),
    ({"origin": "http://127.0.0.1:9999"}, False),
    ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8000"}, True),
    ({"sec-fetch-site": "none"}, True),
    ({"sec-fetch-site": "cross-site"}, False),
    ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:9999"}, False),
    ({"origin": "http://[bad"}, False),
]


@pytest.mark.parametrize(("headers", "passes"), SITES)
async def test_pages_of_other_sites_change_nothing(headers: dict[str, str], passes: bool) -> None:
    """A drain has no body: a browser would send it without asking."""
    async with fronts(keys=(), require_key=False) as there:
        transport = httpx.ASGITransport(there.apps.http)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8000"
        ) as client:
            for method, path in (
                ("POST", "/v1/workers/decode-0/drain"),
                ("DELETE", "/v1/files/file-x"),
                ("POST", "/v1/batches/batch-x/cancel"),
            ):
                answer = await client.request(method, path, headers=headers)
                assert (answer.status_code == 403) is not passes, (path, answer.text)
            assert (await client.get("/live", headers=headers)).status_code == 200


async def test_no_page_reads_answers_unless_its_origin_is_named() -> None:
    page = {"origin": "https://chat.example.com"}
    asking = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    path = "/v1/chat/completions"
    for origins, allowed in (((), False), (("https://chat.example.com",), True), (("*",), True)):
        front = make_front(allowed_origins=origins, keys=KEYS, require_key=True)
        transport = httpx.ASGITransport(front.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answer = await client.options(path, headers=asking)
            assert (answer.status_code == 200) is allowed
            assert ("access-control-allow-origin" in answer.headers) is allowed
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
            answer = await client.post(path, headers=page | bearer("asks"), json=body)
            assert answer.status_code == (200 if allowed else 403)
            assert ("access-control-allow-origin" in answer.headers) is allowed


async def test_a_browser_may_ask_its_user_for_the_key() -> None:
    transport = httpx.ASGITransport(make_front(keys=KEYS, require_key=True).app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        html = {"accept": "text/html,*/*"}
        answer = await client.get("/metrics", headers=html)
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert (await client.get("/metrics")).headers["www-authenticate"] == "Bearer"
        assert (await client.get("/metrics", auth=("me", "reads"))).status_code == 200
        assert (await client.get("/metrics", auth=("reads", "wrong"))).status_code == 401


async def test_heads_and_encodings_are_bounded() -> None:
    transport = httpx.ASGITransport(make_front().app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        many = {f"x-{number}": "a" for number in range(130)}
        answer = await client.get("/live", headers=many)
        assert (answer.status_code, answer.json()["error"]["code"]) == (431, "head_too_large")
        for path in ("/v1/files", "/v1/completions", "/v1/workers/decode-0/drain"):
            answer = await client.post(path, headers={"content-encoding": "gzip"}, content=b"x")
            assert answer.status_code == 415
            assert answer.headers["accept-encoding"] == "identity"
            assert "Content-Encoding" in answer.json()["error"]["message"]


async def test_compressed_messages_are_refused() -> None:
    """A few kB would unfold to as much as a message may have, and more before that is known."""
    async with fronts(keys=(), require_key=False) as there:
        zeros = inference_pb2.GenerateRequest(model="tiny", prompt="a" * (4 << 20))
        async with grpc.aio.insecure_channel(there.grpc) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(
                    zeros, compression=grpc.Compression.Gzip, timeout=DEADLINE_S
                ):
                    pass
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
