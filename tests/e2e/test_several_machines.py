"""A cluster on several machines: prefill and decode on nodes of their own, and the loss of one.

Ray's head and `baton serve` are on the first machine; the workers' nodes have joined by `baton
join`. Once the network is private ones, and once public ones: with keys, certificates, and a Redis
that requires them.
"""

from __future__ import annotations

import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.config.tls import TlsConfig
from deploy.store.redis_access import url_with_certificates
from tests.support.e2e.network import (
    END_S,
    LONG,
    START_S,
    TOKENS,
    LoggedNetwork,
    Network,
    SecuredNetwork,
    body,
    houses_a_worker,
    network,
    workers_on,
)
from tests.support.tls_redis import PASSWORDS

GRPC_HANDOFFS = re.compile(r'baton_handoffs_total{.*outcome="ok",transport="grpc"}')


def reference(model: Path, tokens: int) -> str:
    """What a whole cluster of one machine answers."""
    from tests.support.e2e.cluster import UpProcess  # noqa: PLC0415

    given = ("--model", str(model), "--dtype", "float32", "--served-model-name", "model")
    with UpProcess(*given) as up:
        up.wait_ready()
        import httpx  # noqa: PLC0415

        with httpx.Client(trust_env=False, timeout=START_S) as client:
            answer = client.post(f"{up.http}/v1/completions", json=body("Once", tokens))
        return str(answer.json()["choices"][0]["text"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_prefill_and_decode_on_nodes_of_their_own_and_the_loss_of_one() -> None:
    with network(5, Network) as net, ThreadPoolExecutor() as threads:
        first, second, third, spare = net.others
        net.start_head()
        net.join(first, "prefill", "baton_prefill")
        joined = net.join(second, "decode-a", "baton_decode")
        net.join(third, "decode-b", "baton_decode")
        up = net.up()
        for name in ("prefill", "decode-a"):
            logs = re.search(r"^  logs +(\S+)$", net.text(name), re.MULTILINE)
            assert logs
            assert stat.S_IMODE(Path(logs[1]).parent.stat().st_mode) == 0o700, "not for others"
        # Every worker is where there is a place for it, and KV crosses from machine to machine.
        assert [houses_a_worker(one) for one in (net.head, *net.others)] == [
            *(False, True, True, True),
            False,
        ]
        whole = net.answer()
        series = net.metrics()
        assert sum(series[name] for name in series if GRPC_HANDOFFS.match(name)) >= 1
        assert not any('transport="shm"' in name and value for name, value in series.items())
        # A machine goes amid answers: they go on elsewhere, and its worker where there is room.
        begun = [threading.Event() for _ in range(4)]
        running = [threads.submit(net.streamed, LONG, one) for one in begun]
        assert all(one.wait(START_S) for one in begun)
        third.power_off()
        texts = {one.result(START_S) for one in running}
        assert len(texts) == 1, "all of them are one answer"
        assert net.answer() == whole
        net.join(spare, "spare", "baton_decode")
        net.until(
            lambda: " is back" in net.text("up"),
            "who was lost is not back",
        )
        assert houses_a_worker(spare)
        assert net.answer(prompt="Twice")
        # One that hangs where only Ray can reach it.
        (hanging,) = workers_on(first)
        hanging.suspend()
        net.until(lambda: "prefill-0 is back" in net.text("up"), "it is not replaced")
        hanging.wait(END_S)
        assert net.answer() == whole
        # A node that leaves lets its worker end its requests.
        begun = [threading.Event() for _ in range(4)]
        running = [threads.submit(net.streamed, LONG, one) for one in begun]
        assert all(one.wait(START_S) for one in begun)
        second.terminate(joined)
        assert {one.result(START_S) for one in running} == texts
        assert joined.wait(END_S) == 0, net.text("decode-a")
        assert "is draining" in net.text("decode-a")
        assert net.answer() == whole
        # And the launcher leaves no process behind on any machine.
        net.head.terminate(up)
        assert up.wait(END_S) == 0, net.text("up")
        net.until(lambda: not houses_a_worker(first), "a worker is left")
        net.until(lambda: not houses_a_worker(spare), "a worker is left")
        assert whole == reference(net.folder / "model", TOKENS)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_lines_of_each_worker_are_on_the_standard_output_of_its_node() -> None:
    with network(3, LoggedNetwork) as net:
        first, second = net.others
        net.start_head()
        net.join(first, "prefill", "baton_prefill", "--log-to", "stdout", "--log-format", "json")
        net.start_node(second, "decode", "baton_decode")
        up = net.up(decode=1)
        net.answer()
        net.until(lambda: "prefill-0" in net.writers("prefill"), "no line of the prefill worker")
        net.until(lambda: "decode-0" in net.writers("decode"), "no line of the decode worker")
        assert "node" in net.writers("prefill")
        assert net.writers("up") >= {"launcher", "router-0"}
        assert not net.writers("up") & {"prefill-0", "decode-0"}
        logs = [row["logger"] for row in net.rows("up")]
        assert "baton.requests" in logs
        net.head.terminate(up)
        assert up.wait(END_S) == 0, net.text("up")
        assert "baton.audit" in [row["logger"] for row in net.rows("up")]


STRANGERS = """
import asyncio, json, sys
from pathlib import Path
from baton.rpc.grpc_channel import open_blocking_channel
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.security.tls import TlsFiles
from baton.v1 import cache_pb2, cache_pb2_grpc

async def workers(url, cluster):
    async with redis_client(url) as client:
        return await Registry(client, cluster).all()

def drop_cache(address, files):
    with open_blocking_channel(address, files, files and "worker") as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).DropCache
        return call.future(cache_pb2.DropCacheRequest(), timeout=60).code().name

certs, url, cluster = sys.argv[1:]
shown = [None, *(TlsFiles.in_folder(Path(certs), one) for one in ("client", "router"))]
found = asyncio.run(workers(url, cluster)).values()
print(json.dumps({
    one.slot: [one.address] + [drop_cache(one.address, files) for files in shown]
    for one in found
}))
"""
DENIED = """
import json, redis, sys
with redis.Redis.from_url(sys.argv[1], decode_responses=True) as client:
    print(json.dumps([[one["username"], one["object"]] for one in client.acl_log()]))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_with_keys_and_certificates_kv_crosses_by_mutual_tls() -> None:
    with network(4, SecuredNetwork) as net:
        first, second, spare = net.others
        net.start_head()
        net.join(first, "prefill", "baton_prefill")
        net.join(second, "decode", "baton_decode")
        up = net.up(decode=1)
        whole = net.answer()
        series = net.metrics()
        assert sum(series[name] for name in series if GRPC_HANDOFFS.match(name)) >= 1
        assert not any('transport="shm"' in name and value for name, value in series.items())
        # Without a key there is no answer, without TLS none at all.
        trusted = {"BATON_CA": net.client_env["BATON_CA"]}
        for scheme, env, said in (("https", trusted, "key"), ("http", net.client_env, "")):
            net.scheme, kept, net.client_env = scheme, net.client_env, env
            refused = net.ask("POST", "/v1/completions", body("Once", 2))
            assert said in refused.communicate(timeout=START_S)[0]
            assert refused.returncode == 1
            net.scheme, net.client_env = "https", kept
        # From another machine a certificate is required, and a client's opens nothing.
        tls = TlsConfig(folder=str(net.certs))
        told = url_with_certificates(net.url("supervisor"), tls, "supervisor")
        cluster = net.env["BATON_CLUSTER_ID"]
        tried = net.from_there(spare, STRANGERS, str(net.certs), told, cluster)
        assert tried.keys() == {"prefill-0", "decode-0"}
        for slot, machine in (("prefill-0", first), ("decode-0", second)):
            address, *codes = tried[slot]
            assert address.startswith(f"{machine.address}:")
            assert codes == ["UNAVAILABLE", "PERMISSION_DENIED", "OK"]
        # A worker that comes to another machine is trusted there by the same files.
        second.power_off()
        net.join(spare, "spare", "baton_decode")
        net.until(lambda: "decode-0 is back" in net.text("up"), "who was lost is not back")
        assert houses_a_worker(spare)
        assert net.answer() == whole
        owner = net.url("supervisor").replace(
            f"supervisor:{PASSWORDS['supervisor']}", "owner:owner"
        )
        denied = net.from_there(spare, DENIED, url_with_certificates(owner, tls, "supervisor"))
        # What clients ask on their own, and can do without.
        assert [one for one in denied if one[1] not in ("client|setinfo", "info")] == []
        net.head.terminate(up)
        assert up.wait(END_S) == 0, net.text("up")
        net.until(lambda: not houses_a_worker(first), "a worker is left")
        net.until(lambda: not houses_a_worker(spare), "a worker is left")
        assert whole == reference(net.folder / "model", TOKENS)
