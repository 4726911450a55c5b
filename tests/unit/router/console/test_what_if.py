"""Questions, and the program that answers them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc.aio
import psutil
import pytest
import uvloop
from pydantic import ValidationError

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from baton.host.background import end_tasks
from baton.rpc.grpc_channel import make_server, open_channel
from baton.v1 import control_pb2, control_pb2_grpc
from router.console import what_if
from router.console.what_if import (
    MAX_REQUESTS,
    Shape,
    WhatIfProgram,
    WhatIfQuestion,
    WhatIfRequest,
    present_shape,
    question,
    rate_share,
)
from router.core.recent_requests import RecentRequest
from tests.support.router.looks import record
from tests.support.router.what_if import WORKERS, recent

DEADLINE_S = 60.0
SHAPES = (Shape(prefill=1, decode=2), Shape(prefill=3, decode=4))


def asked(requests: list[RecentRequest], **changes: object) -> WhatIfQuestion:
    fields = {"transfer_line": (2.0, 0.5), "is_cpu": True} | changes
    config = fields.pop("config", Config())
    workers = fields.pop("workers", WORKERS)
    return question(SHAPES, requests, workers, config, **fields)  # type: ignore[arg-type]


def test_a_question_describes_traffic_and_workers() -> None:
    found = asked(recent(12))
    assert found.shapes == SHAPES
    assert present_shape(WORKERS) == SHAPES[0]
    assert present_shape([]) == Shape(prefill=0, decode=1)
    assert [one.at_s for one in found.traffic[:3]] == [0.0, 1.0, 2.0]
    assert (found.traffic[0].input_tokens, found.traffic[0].cached_tokens) == (50, 16)
    profile = found.profiles["decode"]
    assert profile["prefill"] == [2.0, 0.1, 0.0]
    assert profile["kv_tokens"] == 16_000
    token_bytes = 2 * 4 * 2 * 64 * 2
    assert profile["kv_token_bytes"] == token_bytes
    assert profile["wire_bytes_per_s"] == pytest.approx(token_bytes * 16 / 0.0005)
    assert profile["handoff_s"] == 0.002
    assert (profile["is_cpu"], profile["chunk_tokens"]) == (True, 512)


def test_a_rate_and_a_share_change_the_times() -> None:
    twice = asked(recent(12), rate=2.0)
    assert twice.traffic[1].at_s == 0.5
    half = asked(recent(12), share=0.5)
    assert half.traffic[1].at_s == 0.5


def test_shed_requests_count_with_the_mean_length() -> None:
    found = asked([*recent(9, output=20), *recent(3, output=None)])
    assert [one.output_tokens for one in found.traffic[-3:]] == [20] * 3


def test_a_question_needs_traffic_and_is_bounded() -> None:
    assert len(asked(recent(1000)).traffic) == MAX_REQUESTS
    with pytest.raises(InvalidRequest, match="9 requests ended in the last 10 minutes"):
        asked(recent(9))
    with pytest.raises(InvalidRequest):
        asked(recent(50, output=None))
    with pytest.raises(Unavailable, match="calibrated"):
        asked(recent(12), workers=[replace(record(), prefill_cost=(0.0, 0.0, 0.0))])


@pytest.mark.parametrize(
    "told", [{"prefill": False}, {"decode": "1"}, {"decode": 1.5}, {"rate": True}, {"more": 1}]
)
def test_a_what_if_request_takes_numbers_alone(told: dict[str, object]) -> None:
    whole = {"prefill": 1, "decode": 1, "rate": 2}
    assert WhatIfRequest.model_validate(whole | {"prefill": 1.0}).prefill == 1
    with pytest.raises(ValidationError):
        WhatIfRequest.model_validate(whole | told)


def test_no_secret_leaves_the_router() -> None:
    secrets: dict[str, Any] = {
        name: f"redis://:planted@{name}:1/0"
        for name in ("redis_url", "redis_router_url", "redis_worker_url", "gcs_store")
    }
    config = Config(
        keys=(KeyConfig(name="k", sha256="ab" * 32, tenant="default"),),
        cluster_secret="planted" * 8,
        otlp_endpoint="https://planted@127.0.0.1:4317",
        **secrets,
    )
    text = asked(recent(12), config=config).model_dump_json()
    assert "ab" * 32 not in text
    assert "planted" not in text


def test_the_pool_sets_device_and_chunk_of_a_profile() -> None:
    pools = (
        PoolConfig(name="prefill", role="prefill", device="cuda"),
        PoolConfig(name="decode", role="decode", device="cpu", chunk_tokens=100, max_sequences=8),
    )
    profiles = asked(recent(12), config=Config(pools=pools)).profiles
    assert (profiles["prefill"]["is_cpu"], profiles["prefill"]["chunk_tokens"]) == (False, 8192)
    assert (profiles["decode"]["is_cpu"], profiles["decode"]["chunk_tokens"]) == (True, 100)


def test_the_rate_share_of_a_process() -> None:
    assert rate_share(0, []) == 1
    assert rate_share(5, [5, 15]) == 0.25
    assert rate_share(30, [5]) == 1


def program(script: str) -> WhatIfProgram:
    return WhatIfProgram((sys.executable, "-c", script))


ANSWER = {
    "prefill": 1,
    "decode": 2,
    "ttft_s": {"p50": 0.1, "p95": 0.2},
    "tpot_s": {"p50": 0.1, "p95": 0.2},
    "e2el_s": {"p50": 0.1, "p95": None},
    "good_share": 1.0,
    "shed_share": 0.0,
    "prefill_busy": None,
    "decode_busy": 0.5,
}


async def test_answers_come_one_by_one() -> None:
    """The first is here while the program still works at the second."""
    line = json.dumps(ANSWER)
    script = f"import sys, time; sys.stdin.read(); print({line!r}, flush=True); time.sleep(600)"
    asking = program(script)
    before = psutil.Process().children()
    async with asyncio.timeout(DEADLINE_S), aclosing(asking.shapes(asked(recent(12)))) as answers:
        assert (await anext(answers)).model_dump() == ANSWER
        assert asking.is_busy
    assert not asking.is_busy
    assert psutil.Process().children() == before, "it is gone"


async def test_a_whole_answer() -> None:
    line = json.dumps(ANSWER)
    found = await program(f"print({line!r}); print({line!r})").ask(asked(recent(12)))
    assert (found.requests, found.seconds, len(found.shapes)) == (12, 11.0, 2)


async def test_a_hanging_simulator_is_killed() -> None:
    before = psutil.Process().children()
    with pytest.raises(DeadlineExceeded, match="fewer workers"):
        await program("import time; time.sleep(600)").ask(asked(recent(12), deadline_s=0.2))
    assert psutil.Process().children() == before, "it is gone"


async def test_a_failing_simulator_is_reported() -> None:
    with pytest.raises(BatonError, match="planted"):
        await program("import sys; sys.exit('planted')").ask(asked(recent(12)))
    with pytest.raises(BatonError, match="cannot be read"):
        await program("print('{}')").ask(asked(recent(12)))
    with pytest.raises(BatonError, match="answered for 1 of 2 clusters"):
        await program(f"print({json.dumps(ANSWER)!r})").ask(asked(recent(12)))


def test_programs_start_while_grpc_is_busy() -> None:
    """On the router's loop, where fuzzing met children that had died before they were programs."""
    true = shutil.which("true")
    assert true is not None
    nothing = WhatIfProgram((true,))

    async def ask() -> None:
        server = make_server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with asyncio.timeout(DEADLINE_S), open_channel(f"127.0.0.1:{port}") as channel:
            calling = asyncio.create_task(_call_on(channel))
            try:
                for _ in range(150):
                    with pytest.raises(BatonError, match="answered for 0 of 2"):
                        await nothing.ask(asked(recent(12)))
            finally:
                await end_tasks([calling])
                await server.stop(0)

    uvloop.run(ask())


async def _call_on(channel: grpc.aio.Channel) -> None:
    """Of a server that knows no method."""
    drain = control_pb2_grpc.ControlServiceStub(channel).Drain
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await drain(control_pb2.DrainRequest(), timeout=DEADLINE_S)


async def test_children_of_the_simulator_do_not_delay_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its child has its output open, and lives on."""
    monkeypatch.setattr(what_if, "_END_S", 0.1)
    orphan = ["sleep", f"600.{secrets.randbits(32)}"]
    asking = program(f"import subprocess; subprocess.run({orphan})")
    try:
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(asking.ask(asked(recent(12), deadline_s=2.0)), DEADLINE_S)
        assert not asking.is_busy
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == orphan:
                process.kill()


async def test_the_simulator_answers_one_question_at_a_time() -> None:
    hanging = program("import time; time.sleep(600)")
    first = asyncio.create_task(hanging.ask(asked(recent(12))))
    async with asyncio.timeout(DEADLINE_S):
        while not hanging.is_busy:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await hanging.ask(asked(recent(12)))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not hanging.is_busy
    assert WhatIfProgram.of(()) is None
