"""What operators choose and the supervisor tells, in a real store."""

from __future__ import annotations

from baton.store.redis_client import redis_client
from baton.store.supervision import (
    TTL_S,
    PoolSizes,
    ScalingDecision,
    SlotDeaths,
    SupervisionReport,
    supervision_key,
    supervision_report,
)
from deploy.supervisor.reconciler import Phase, SlotState
from deploy.supervisor.status_store import SlotStatus, StatusStore, SupervisionStatus

KEY = "baton:{sizes-test}:pool-sizes"


async def test_sizes_are_kept_while_a_client_reads_them(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        sizes = PoolSizes(client, "sizes-test")
        assert await sizes.read() == {}
        await sizes.write("decode", 3)
        await sizes.write("prefill", 0)
        await client.expire(KEY, 5)
        assert await sizes.read() == {"decode": 3, "prefill": 0}
        assert 5 < await client.ttl(KEY) <= TTL_S
        await client.hset(KEY, "decode", "many")
        assert await sizes.read() == {"prefill": 0}
        await sizes.clear()
        assert await client.exists(KEY) == 0


async def test_a_size_that_was_lost_is_restored_and_a_newer_choice_stays(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        sizes = PoolSizes(client, "sizes-test")
        await sizes.restore("decode", 3)
        assert await sizes.read() == {"decode": 3}
        await sizes.write("decode", 5)  # an operator, after the supervisor has read
        await sizes.restore("decode", 3)
        assert await sizes.read() == {"decode": 5}
        assert 0 < await client.ttl(KEY) <= TTL_S
        await sizes.clear()


async def test_the_supervisors_status_is_read_as_long_as_it_tells(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        board = StatusStore(client, "page-test")
        assert await supervision_report(client, "page-test") is None
        decision = ScalingDecision(5.0, "decode gets a worker (slo: why)")
        slot = SlotStatus(SlotState(Phase.CRASH_LOOP, 5, "exit code 1"))
        await board.write(
            SupervisionStatus(7, "127.0.0.1:9", {"decode-0": slot}, decisions=(decision,))
        )
        assert await supervision_report(client, "page-test") == SupervisionReport(
            "127.0.0.1:9", {"decode-0": SlotDeaths(5, "exit code 1", True)}, (decision,)
        )
        told = await board.read()
        assert told is not None
        assert told.decisions == (decision,)
        earlier = '{"pid": 1, "metrics_address": "127.0.0.1:9", "slots": {}, "autoscaler": ""}'
        await client.set(supervision_key("page-test"), earlier, ex=5)
        report = await supervision_report(client, "page-test")
        assert report == SupervisionReport("127.0.0.1:9", {}, ())
        for other in ('{"pid": 1}', "[]", "?", '{"metrics_address": "", "slots": {"a": 1}}'):
            await client.set(supervision_key("page-test"), other, ex=5)
            assert await supervision_report(client, "page-test") is None
        await board.clear()
