"""What each role's user of the store may do: all that it needs, and no more.

Against a real Valkey, and against Debian's Redis with TLS where that is installed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import redis
import redis.asyncio
from prometheus_client import CollectorRegistry

from baton.autoscaling.traffic import RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.config.tls import TlsConfig
from baton.security.tls import TlsFiles
from baton.store.pin_store import PinStore
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes, supervision_report
from baton.telemetry.metrics import RouterMetrics
from deploy.launcher.cluster_workers import forget_cluster
from deploy.processes.leadership import LauncherLease, SupervisorTerm
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.store.redis_access import STORE_USERS, StoreUser, store_url, url_with_user
from deploy.store.shared_secret import SharedSecret
from deploy.store.valkey import EmbeddedValkey
from deploy.supervisor.status_store import StatusStore, SupervisionStatus
from router.access.rate_limits import RateLimits
from router.admin.router_questions import Answers, RouterQuestions
from router.admin.store_memory import StoreMemory
from tests.support.certificates import Authority
from tests.support.integration.redis import record_of
from tests.support.router.pins import pin
from tests.support.tls_redis import PASSWORDS, tls_redis, urls_of

ID = "c1"
HASHES = [bytes([n]) * 16 for n in range(40)]


@pytest.fixture
async def valkey(mark: ClusterMark, run: RunDirectory) -> AsyncIterator[EmbeddedValkey]:
    started = EmbeddedValkey(mark, run, 64)
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def store(valkey: EmbeddedValkey) -> AsyncIterator[redis.asyncio.Redis]:
    """As its owner: of every key that a cluster has there is one."""
    async with redis_client(valkey.url) as client:
        await work_as_a_cluster(valkey.url_of)
        for key in await client.keys("*"):
            # On a busy machine a rate limit's key ends before the test does.
            await client.persist(key)
        yield client


async def work_as_a_cluster(url_of: Callable[[StoreUser], str]) -> None:
    """Everything that each role asks of the store, by its own user."""
    async with (
        redis_client(url_of("worker")) as worker,
        redis_client(url_of("router")) as router,
        redis_client(url_of("supervisor")) as supervisor,
    ):
        await _work(worker)
        await _route(router)
        memory = RouterMetrics(CollectorRegistry())
        await StoreMemory(router, memory).look()
        lease = LauncherLease(supervisor, ID, "launcher")
        await lease.take(lambda: None)
        await lease.order_epoch()
        term = SupervisorTerm(supervisor, ID)
        await term.begin()
        await term.rise_above(1)
        assert not await term.is_over()
        other = LauncherLease(supervisor, ID, "other")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await other.take(lambda: None)
        await lease.give_up()
        used = memory.registry.get_sample_value("baton_redis_memory_used_bytes")
        assert used is not None
        assert 0 < used < (memory.registry.get_sample_value("baton_redis_memory_total_bytes") or 0)
        board = StatusStore(supervisor, ID)
        await board.write(SupervisionStatus(1, "127.0.0.1:1"))
        report = await supervision_report(router, ID)
        assert report is not None
        assert report.metrics_address == "127.0.0.1:1"
        assert await board.read() is not None
        assert await PoolSizes(supervisor, ID).read() == {"decode": 3}
        assert set(await Registry(supervisor, ID).all()) == {"w:1"}
        assert "w:1" in await Registry(supervisor, ID).leases()
        assert set(await TrafficStore(supervisor, ID).read()) == {"router-1"}
        await TrafficStore(supervisor, ID).remove(["nobody"])
        secret = await SharedSecret(url_of("supervisor"), ID).read()
        assert await SharedSecret(url_of("router"), ID).read() == secret


async def _work(client: redis.asyncio.Redis) -> None:
    index, registry = PrefixIndex(client, ID), Registry(client, ID)
    for incarnation in ("w:1", "w:2"):
        await registry.put(record_of(incarnation), 30.0)
        generation = await index.begin(incarnation)
        assert await index.apply(incarnation, generation, 0, HASHES, [])
        assert await index.apply(incarnation, generation, 1, [], HASHES[20:])
        await registry.put(record_of(incarnation, state="draining"), 30.0)
    await registry.remove("w:2")


async def _route(client: redis.asyncio.Redis) -> None:
    index, registry = PrefixIndex(client, ID), Registry(client, ID)
    records, dead = await registry.read()
    assert set(records) == {"w:1"}
    assert dead == {"w:2"}
    assert (await index.lookup(HASHES))["w:1"] == 20
    assert (await index.size()).blocks == 20
    await index.collect("w:2")
    await registry.forget("w:2")
    await TrafficStore(client, ID).write("router-1", RouterTraffic(1, TrafficCounts()))
    await PoolSizes(client, ID).write("decode", 3)
    await _ask_routers(client)
    pins = PinStore(client, ID)
    await pins.write(pin(HASHES[:2], expires_at=1.0))
    await pins.write(pin(HASHES[:3], expires_at=time.time() + 600))
    await pins.remove("prefix_unknown")
    assert len(await pins.read()) == 1
    limits = RateLimits(client, ID, RouterMetrics(CollectorRegistry()))
    key = KeyConfig(
        name="k", tenant="default", requests_per_minute=9, tokens_per_minute=999, concurrency=3
    )
    for unsure in (False, True):
        visit = await limits.arrive(key, 30.0)
        assert visit is not None
        await limits.charge(visit, 10, [5])
        assert not visit.unsure, "Redis has refused it"
        assert visit.allowances
        visit.unsure = unsure
        limits.leave(visit)
        await limits.close()
    assert not limits._reports, "Redis has refused it"


async def _ask_routers(client: redis.asyncio.Redis) -> None:
    one, two = [RouterQuestions(client, ID, f"router-{n}", str.encode) for n in (1, 2)]
    await TrafficStore(client, ID).write("router-2", RouterTraffic(1, TrafficCounts()))
    asking = asyncio.create_task(one.ask("mine"))
    while not asking.done():
        await two.look()
        await asyncio.sleep(0.01)
    assert await asking == Answers([b"mine"], 1)
    await TrafficStore(client, ID).remove(["router-2"])


async def _kinds(store: redis.asyncio.Redis) -> set[str]:
    return {str(key).split("}:")[1].split(":")[0].rstrip("'") for key in await store.keys("*")}


async def test_every_role_can_do_all_that_it_does(store: redis.asyncio.Redis) -> None:
    # The library tells of itself where it may; Redis before 7.2 has no such command to allow.
    log = await store.acl_log()
    denied = [one for one in log if one["object"] not in ("client|setinfo", "AUTH")]
    assert [(one["username"], one["object"]) for one in denied] == []
    kinds = await _kinds(store)
    assert kinds >= {
        "registry",
        "worker",
        "index",
        "limit",
        "traffic",
        "pins",
        "pool-sizes",
        "supervision",
        "secret",
    }


async def test_a_cluster_s_keys_are_dropped_by_the_supervisor_s_user(
    valkey: EmbeddedValkey, store: redis.asyncio.Redis
) -> None:
    async with redis_client(valkey.url_of("worker")) as worker:
        await Registry(worker, ID).remove("w:1")
    async with redis_client(valkey.url_of("supervisor")) as supervisor:
        await forget_cluster(supervisor, ID)
    left = await _kinds(store)
    # Routers that run on know the secret, which the cluster's next launcher must have, too.
    assert left <= {"limit", "secret"}


async def test_workers_cannot_read_the_cluster_s_secret(
    valkey: EmbeddedValkey, store: redis.asyncio.Redis
) -> None:
    """Whose user reads the prefix index could compute the names of prompts with it."""
    key = f"baton:{{{ID}}}:secret"
    assert await store.exists(key)
    async with redis_client(valkey.url_of("worker")) as worker:
        for read in (worker.get(key), worker.eval("return redis.call('GET', KEYS[1])", 1, key)):
            with pytest.raises(redis.ResponseError):
                await read


COMMANDS = (
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SWAPDB", "0", "1"),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "dir", "/tmp"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "worker", "+@all"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "ID", "1"),
    ("INFO",),
    ("MONITOR",),
    ("SHUTDOWN",),
    ("SAVE",),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("MODULE", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "FLUSH"),
    ("SUBSCRIBE", "news"),
    ("PUBLISH", "news", "x"),
    ("SLOWLOG", "GET"),
    ("LATENCY", "RESET"),
)
"""A user of no serving process."""
OWNERS_KEYS: dict[StoreUser, tuple[str, ...]] = {
    "worker": (
        *("limit:k:requests", "limit:new", "traffic", "pins", "pool-sizes", "supervision"),
        *("questions", "questions:1", "new"),
    ),
    "router": ("new", "keys"),
}
"""Keys of a cluster that a role has no business with, whether they are there or not."""


@pytest.mark.parametrize("user", ["worker", "router"])
async def test_the_server_is_none_of_its_business(
    valkey: EmbeddedValkey, store: redis.asyncio.Redis, user: StoreUser
) -> None:
    before = await store.dbsize()
    for command in COMMANDS:
        if (user, command) == ("router", ("INFO",)):
            continue  # it exports the server's memory
        async with redis_client(valkey.url_of(user)) as opened:
            client: Any = opened
            with pytest.raises(redis.exceptions.NoPermissionError):
                await client.execute_command(*command)
    assert await store.dbsize() == before


@pytest.mark.parametrize("user", ["worker", "router"])
async def test_what_is_others_is_neither_read_nor_written(
    valkey: EmbeddedValkey, store: redis.asyncio.Redis, user: StoreUser
) -> None:
    keys = [f"baton:{{{ID}}}:{name}" for name in OWNERS_KEYS[user]]
    keys += ["elsewhere", "baton:elsewhere", f"other:baton:{{{ID}}}:registry"]
    await store.set("elsewhere", "secret")
    before = {key: await store.dump(key) for key in await store.keys("*")}
    async with redis_client(valkey.url_of(user)) as client:
        for key in keys:
            await _nothing_works(client, key)
    assert {key: await store.dump(key) for key in await store.keys("*")} == before


async def _nothing_works(client: Any, key: str) -> None:
    """Neither by itself nor out of a script, with the key declared or hidden."""
    script = "return redis.call(ARGV[1], ARGV[2], unpack(ARGV, 3))"
    tries: tuple[tuple[str, ...], ...] = (
        ("GET", key),
        ("HGETALL", key),
        ("SET", key, "x"),
        ("DEL", key),
        ("HSET", key, "f", "v"),
        ("EXPIRE", key, "1"),
    )
    for name, *rest in tries:
        asked: list[Awaitable[Any]] = [
            client.execute_command(name, *rest),
            client.eval(script, 0, name, *rest),
            client.eval("return redis.call('HGETALL', KEYS[1])", 1, key),
        ]
        for call in asked:
            with pytest.raises(redis.exceptions.ResponseError, match=r"NOPERM|permission|ACL"):
                await call


async def test_a_router_reads_the_supervisor_s_word_and_cannot_change_it(
    valkey: EmbeddedValkey, store: redis.asyncio.Redis
) -> None:
    key = f"baton:{{{ID}}}:supervision"
    async with redis_client(valkey.url_of("router")) as opened:
        client: Any = opened
        assert await client.get(key)
        for command in (("SET", key, "x"), ("DEL", key), ("EXPIRE", key, "1")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                await client.execute_command(*command)
    assert "127.0.0.1:1" in str(await store.get(key))


async def test_a_worker_s_password_is_not_another_user_s(valkey: EmbeddedValkey) -> None:
    password = valkey.url_of("worker").split(":")[2].split("@")[0]
    for user in ("router", "supervisor", "default"):
        async with redis_client(f"redis://{user}:{password}@{valkey.address}/0") as client:
            with pytest.raises(redis.exceptions.AuthenticationError):
                await client.ping()


# With TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_port(tmp_path: Path, authority: Authority) -> Iterator[int]:
    with tls_redis(authority, tmp_path) as port:
        yield port


def config_of(authority: Authority, port: int) -> Config:
    tls = TlsConfig(folder=str(authority.folder))
    return Config(**urls_of(port), tls=tls)  # type: ignore[arg-type]


async def test_roles_work_over_tls_with_their_certificates(
    tls_port: int, authority: Authority
) -> None:
    config = config_of(authority, tls_port)
    await work_as_a_cluster(lambda user: store_url(config, user))


async def test_a_certificate_of_the_cluster_is_required(
    tls_port: int, authority: Authority, tmp_path: Path
) -> None:
    config = config_of(authority, tls_port)
    other = Authority(tmp_path, "other").folder
    plain = f"rediss://router:{PASSWORDS['router']}@127.0.0.1:{tls_port}/0"
    own = f"?ssl_ca_certs={authority.certificate}"
    for url in (
        plain.replace("rediss", "redis"),
        plain + own,
        f"{plain}{own}&ssl_certfile={other}/router.pem&ssl_keyfile={other}/router.key",
        # And a server that the cluster's authority does not vouch for gets no password.
        store_url(config.model_copy(update={"tls": TlsConfig(folder=str(other))}), "router"),
    ):
        async with redis_client(url) as client:
            with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
                await client.ping()


def test_a_url_that_names_its_files_keeps_them(authority: Authority) -> None:
    config = config_of(authority, 1)
    own = config.redis_router_url + "?ssl_ca_certs=/etc/ca.pem"
    changed = config.model_copy(update={"redis_router_url": own})
    assert store_url(changed, "router") == own.replace("/etc/ca.pem", "%2Fetc%2Fca.pem")
    assert store_url(Config(), "router") == ""
    plain = Config(redis_url="redis://:p@h:1/0")
    assert {store_url(plain, user) for user in STORE_USERS} == {"redis://:p@h:1/0"}


def test_a_password_may_have_any_letters() -> None:
    url = url_with_user("redis://:old@h:6379/0", "router", "a/b@c:d?")
    assert url == "redis://router:a%2Fb%40c%3Ad%3F@h:6379/0"


async def test_renewed_certificates_are_shown_when_it_connects_again(tmp_path: Path) -> None:
    """What a client showed at first lets it in no more, as after its end."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    shown = authority.sign("mine")
    renewed = [path.read_bytes() for path in shown.paths]
    foreign = TlsFiles.in_folder(other.folder, "worker")
    with tls_redis(authority, tmp_path) as port:
        for ours, theirs in zip(shown.paths[:2], foreign.paths[:2], strict=True):
            ours.write_bytes(theirs.read_bytes())
        files = dict(zip(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), shown.paths, strict=True))
        async with redis_client(
            f"{urls_of(port)['redis_worker_url']}?{urlencode(files)}"
        ) as client:
            with pytest.raises(redis.ConnectionError):
                await client.get("none of its keys")
            for ours, now in zip(shown.paths[:2], renewed[:2], strict=True):
                ours.write_bytes(now)
            with pytest.raises(redis.exceptions.NoPermissionError):
                await client.get("none of its keys")
