"""What operators choose and the supervisor tells, in a real store."""

from __future__ import annotations

from baton.store.redis_client import redis_client
from baton.store.supervision import TTL_S, PoolSizes, supervision_key, supervision_page
from deploy.supervisor.status_store import StatusStore, SupervisionStatus

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


async def test_the_supervisors_page_is_found_as_long_as_it_tells(redis_url: str) -> None:
    async with redis_client(redis_url) as client:
        board = StatusStore(client, "page-test")
        assert await supervision_page(client, "page-test") is None
        await board.write(SupervisionStatus(7, "127.0.0.1:9"))
        assert await supervision_page(client, "page-test") == "127.0.0.1:9"
        for other in ('{"pid": 1}', "[]", "?"):
            await client.set(supervision_key("page-test"), other, ex=5)
            assert await supervision_page(client, "page-test") is None
        await board.clear()
