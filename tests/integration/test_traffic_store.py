"""What routers have counted, in a real store."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from baton.autoscaling.traffic import RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TTL_S, TrafficStore
from baton.store.redis_client import redis_client
from router.dispatch.traffic_report import TrafficReport

DEADLINE_S = 60.0
KEY = "baton:{traffic-test}:traffic"


async def test_counts_are_reported_read_and_removed(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        board = TrafficStore(client, "traffic-test")
        assert await board.read() == {}
        counts = TrafficCounts(requests=3, input_tokens=1.5, prefill_s=0.25)
        await board.write("a", RouterTraffic(1, counts))
        await board.write("b", RouterTraffic(7, TrafficCounts()))
        told = await board.read()
        assert told["a"].beat == 1
        assert asdict(told["a"].counts) == asdict(counts)
        assert 0 < await client.ttl(KEY) <= TTL_S
        for other in ("?", "[]", '{"beat": null}'):
            await client.hset(KEY, "c", other)
            assert set(await board.read()) == {"a", "b"}
        await board.remove(["a", "c"])
        await board.remove([])
        assert set(await board.read()) == {"b"}
        await board.clear()
        assert await client.exists(KEY) == 0


async def test_a_router_tells_while_it_lives(redis_url: str) -> None:
    counts = TrafficCounts()
    async with redis_client(redis_url) as client:
        board = TrafficStore(client, "report-test")
        report = TrafficReport(board, "router-1", counts)
        await report.close()
        report.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                while "router-1" not in (told := await board.read()):
                    await asyncio.sleep(0.01)
                counts.requests += 5
                first = told["router-1"].beat
                while (await board.read())["router-1"].counts.requests != 5:
                    await asyncio.sleep(0.05)
                assert (await board.read())["router-1"].beat > first
        finally:
            await report.close()
        assert await board.read() == {}


async def test_an_unreachable_store_blocks_no_counting() -> None:
    async with redis_client("redis://127.0.0.1:1", timeout_s=0.2) as client:
        report = TrafficReport(TrafficStore(client, "away"), "router-1", TrafficCounts())
        report.start()
        await asyncio.sleep(0.05)
        await report.close()
