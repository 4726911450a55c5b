"""Passwords of Redis in files, and the count of calls to Redis.

Each call counts once: by its time, or as a failure.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.store.redis_client import RedisCalls, redis_client
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.worker_metrics import WorkerMetrics

LABELS = {"role": "router", "call": "x"}


def make(times: list[float]) -> tuple[RouterMetrics, RedisCalls]:
    metrics = RouterMetrics(CollectorRegistry())
    seconds = metrics.redis_call_seconds.labels(**LABELS)
    failures = metrics.redis_failures.labels(**LABELS)
    return metrics, RedisCalls(seconds, failures, iter(times).__next__)


def value(metrics: RouterMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_redis_{name}", LABELS)


def test_an_answer() -> None:
    metrics, calls = make([10.0, 10.25])
    with calls.one():
        pass
    assert value(metrics, "call_seconds_count") == 1
    assert value(metrics, "call_seconds_sum") == 0.25
    assert value(metrics, "failures_total") == 0


@pytest.mark.parametrize("error", [redis.ConnectionError("away"), TimeoutError(), OSError()])
def test_no_answer(error: Exception) -> None:
    metrics, calls = make([10.0])
    with pytest.raises(type(error)), calls.one():
        raise error
    assert value(metrics, "call_seconds_count") == 0
    assert value(metrics, "failures_total") == 1


def test_one_that_is_cancelled_is_neither() -> None:
    metrics, calls = make([10.0])
    with pytest.raises(asyncio.CancelledError), calls.one():
        raise asyncio.CancelledError
    assert value(metrics, "call_seconds_count") == value(metrics, "failures_total") == 0


def test_router_and_worker_have_accounts_of_their_own() -> None:
    router, worker = RouterMetrics(CollectorRegistry()), WorkerMetrics(CollectorRegistry())
    with router.redis_calls("a").one(), worker.redis_calls("decode", "b").one():
        pass
    for metrics, labels in (
        (router, {"role": "router", "call": "a"}),
        (worker, {"role": "decode", "call": "b"}),
    ):
        found = metrics.registry.get_sample_value("baton_redis_call_seconds_count", labels)
        assert found == 1


def test_a_password_is_read_from_its_file_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "pass word"
    url = f"redis://the%20user@127.0.0.1:1/3?password_file={file}&protocol=2"
    options = redis_client(url).connection_pool.connection_kwargs
    assert (options["host"], options["port"], options["db"]) == ("127.0.0.1", 1, 3)
    assert options["protocol"] == 2
    provider = options["credential_provider"]
    for password in ("first", "second"):
        file.write_text(password + "\n")
        assert provider.get_credentials() == ("the user", password)
    without_user = redis_client(url.replace("the%20user@", "")).connection_pool.connection_kwargs
    assert without_user["credential_provider"].get_credentials() == ("second",)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff"])
async def test_a_password_that_cannot_be_read_is_a_failed_connection(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, redis_client(f"redis://127.0.0.1:{port}?password_file={file}") as client:
        with pytest.raises(redis.ConnectionError, match="password_file"):
            await client.ping()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:secret@127.0.0.1:1?password_file=/p", "leave one of them out"),
        ("redis://127.0.0.1:1?password_file=p", "must be an absolute path"),
    ],
)
def test_an_address_with_a_wrong_password_file_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as found:
        redis_client(url)
    assert "secret" not in str(found.value)


def test_an_address_without_a_password_file_stays_as_it_is() -> None:
    options = redis_client("redis://u:p@127.0.0.1:1").connection_pool.connection_kwargs
    assert (options["username"], options["password"]) == ("u", "p")
    assert "credential_provider" not in options
