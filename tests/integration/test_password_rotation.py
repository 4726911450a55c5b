"""The password of the store changes while a router and its workers serve: no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from baton.request import FinishReason
from baton.sampling_params import SamplingParams
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster, valkey

USER = "baton"
TOKENS = 8


@pytest.fixture
def admin() -> Iterator[redis.Redis]:
    """The owner of a Valkey that this test alone uses."""
    with valkey() as url, redis.Redis.from_url(url) as client:
        yield client


class Secret:
    """The store's password, as the server and as the file have it."""

    def __init__(self, admin: redis.Redis, file: Path) -> None:
        self.admin, self.file = admin, file

    def on_server(self, password: str) -> None:
        """Make ``password`` the only one, and end all connections."""
        self.admin.acl_setuser(
            USER,
            enabled=True,
            reset_passwords=True,
            passwords=[f"+{password}"],
            keys=["*"],
            channels=["*"],
            commands=["+@all"],
        )
        self.admin.client_kill_filter(user=USER)

    def in_file(self, password: str) -> None:
        """Replace the file's content at once, as a mounted Secret is."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(password)
        fresh.rename(self.file)


async def _requests(cluster: MiniCluster, stop: asyncio.Event) -> list[tuple[int, ...]]:
    answers = []
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    number = 0
    while not stop.is_set():
        number += 1
        prompt = tuple(10 + (number * 7 + place) % 80 for place in range(40))
        answer = await cluster.answer(prompt, sampling)
        assert answer.finish_reason is FinishReason.LENGTH
        answers.append(answer.token_ids)
    return answers


@pytest.mark.parametrize("first", ["file", "server"])
async def test_a_new_password_replaces_no_worker_and_loses_no_request(
    admin: redis.Redis, tiny_model: Path, tmp_path: Path, first: str
) -> None:
    """Where the server has it first, all new connections are refused until the file has it too."""
    secret = Secret(admin, tmp_path / "password")
    secret.in_file("one")
    secret.on_server("one")
    port = admin.connection_pool.connection_kwargs["port"]
    url = f"redis://{USER}@127.0.0.1:{port}/0?password_file={secret.file}"
    async with (
        mini_cluster(tiny_model, url, heartbeat_s=0.2) as cluster,
        asyncio.timeout(DEADLINE_S),
    ):
        before = _incarnations(cluster)
        stop = asyncio.Event()
        running = asyncio.create_task(_requests(cluster, stop))
        if first == "file":
            secret.in_file("two")
            secret.on_server("two")
        else:
            secret.on_server("two")
            await _refused(cluster)
            secret.in_file("two")
        leases = await _leases(cluster)
        while not all(until > leases[name] for name, until in (await _leases(cluster)).items()):
            assert not running.done()
            await asyncio.sleep(0.05)
        stop.set()
        answers = await running
        assert answers
        assert all(len(answer) == TOKENS for answer in answers)
        assert _incarnations(cluster) == before
        assert set(await cluster.registry.all()) == before


def _incarnations(cluster: MiniCluster) -> set[str]:
    records = [worker.record for worker in cluster.workers.values()]
    return {record.incarnation for record in records if record is not None}


async def _refused(cluster: MiniCluster) -> None:
    """Wait until the server refuses a worker's or a router's old password."""
    while True:
        try:
            await cluster.redis.ping()
        except redis.AuthenticationError:
            return
        except redis.ConnectionError:
            # The connection that the server has just ended.
            await asyncio.sleep(0.05)
        await asyncio.sleep(0)


async def _leases(cluster: MiniCluster) -> dict[str, float]:
    while True:
        try:
            return await cluster.registry.leases()
        except redis.ConnectionError:
            await asyncio.sleep(0.05)
