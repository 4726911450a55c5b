"""Which clusters `baton calibrate` times, and which it cannot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.client.http_api import open_async_api
from baton.errors import ConfigError, Unavailable
from baton.store.registry import Registry
from deploy.cli.measure.calibrate_command import local_prompts, the_decode_worker
from deploy.processes.cluster_state import ClusterState
from deploy.processes.process_identity import ProcessIdentity
from tests.support.loadtest.fake_server import Asked, fake_server

LAUNCHER = ProcessIdentity(1, 1, "nowhere")
PAGE = """# TYPE baton_route_decisions counter
baton_route_decisions_total{decision="local",reason="least_ttft"} 3.0
baton_route_decisions_total{decision="local",reason="no_room"} 2.0
baton_route_decisions_total{decision="remote",reason="least_ttft"} 7.0
"""


def state() -> ClusterState:
    return ClusterState(
        "id", "/nowhere", "m", "127.0.0.1:1", "", "redis://127.0.0.1:1/0", LAUNCHER, {}
    )


def listed(monkeypatch: pytest.MonkeyPatch, *roles: str) -> None:
    async def all_records(_: Registry) -> dict[str, Any]:
        return {str(n): SimpleNamespace(role=role, slot=n) for n, role in enumerate(roles)}

    monkeypatch.setattr(Registry, "all", all_records)


async def test_prompts_of_decode_workers_are_counted() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert "/metrics" in asked.line
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(PAGE)}\r\n\r\n{PAGE}".encode())

    async with fake_server(answer) as server, open_async_api(server.url) as client:
        assert await local_prompts(client, f"{server.url}/metrics") == 5


async def test_a_router_that_does_not_answer_is_reported() -> None:
    async with open_async_api("http://127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match="no router answers at http://127"):
            await local_prompts(client, "http://127.0.0.1:1/metrics")


async def test_one_worker_of_each_role_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch, "prefill", "decode")
    assert (await the_decode_worker(state())).role == "decode"


@pytest.mark.parametrize(
    ("roles", "error", "message"),
    [
        (("prefill",), Unavailable, "no decode worker"),
        (("decode",), Unavailable, "no prefill worker"),
        (("prefill", "decode", "decode"), ConfigError, "has 2 decode workers"),
        (("prefill", "prefill", "decode"), ConfigError, "--prefill 1 --decode 1"),
    ],
)
async def test_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, roles: tuple[str, ...], error: type[Exception], message: str
) -> None:
    listed(monkeypatch, *roles)
    with pytest.raises(error, match=message):
        await the_decode_worker(state())
