"""A cluster on several machines: prefill and decode on nodes of their own, and the loss of one.

Each machine has its own network, its own processes and its own idea of process ids. Ray's head and
`baton serve` are on the first; the workers' nodes have joined by `baton join`. Once the network is
private ones, and once public ones: with keys, certificates, and a Redis that requires them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil
import pytest

from baton.config.tls import TlsConfig
from baton.valkey_binary import valkey_binary
from deploy.store.redis_access import StoreUser, url_with_certificates
from tests.support.machines import Machine, machines
from tests.support.models import make_tiny_model
from tests.support.tls_redis import PASSWORDS, commands

BATON, RAY = (str(Path(sys.executable).with_name(name)) for name in ("baton", "ray"))
START_S = 180.0
END_S = 90.0
TOKENS = 64
LONG = 1200
REDIS_PORT = 6390
ASK = """
import os, ssl, sys, httpx
method, url, body = sys.argv[1], sys.argv[2], sys.argv[3]
trusted = os.environ.get("BATON_CA")
verify = ssl.create_default_context(cafile=trusted) if trusted else True
key = os.environ.get("BATON_API_KEY", "")
headers = {"authorization": f"Bearer {key}"} if key else {}
with httpx.Client(trust_env=False, timeout=150, verify=verify, headers=headers) as client:
    with client.stream(method, url, content=body or None) as answer:
        for piece in answer.iter_text():
            print(piece, end="", flush=True)
    sys.exit(answer.status_code != 200)
"""
CONFIG = """
model = "{model}"
ray_address = "{head}:6379"
dtype = "float32"
local_prefill = "never"
drain_deadline_s = 20
{stores}
[[pools]]
name = "prefill"
role = "prefill"
threads = 1
kv_pool_mib = 16
resources = {{ baton_prefill = 1 }}
[[pools]]
name = "decode"
role = "decode"
count = {decode}
threads = 1
kv_pool_mib = 16
resources = {{ baton_decode = 1 }}
"""


class Network:
    """The machines, and what runs on them: a network of one's own, without keys and TLS."""

    scheme = "http"

    def __init__(self, folder: Path, all_of_them: list[Machine]) -> None:
        self.folder = folder
        self.head, *self.others = all_of_them
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        # Programs there find what is installed here, and the repository.
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "BATON_CLUSTER_ID": f"machines-{secrets.token_hex(4)}",
            "BATON_DATA_DIR": str(folder / "data"),
            "PYTHONUNBUFFERED": "1",
        }
        self.client_env: dict[str, str] = {}
        """A second listener, for any caller."""

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def text(self, name: str) -> str:
        log = self.log(name)
        return log.read_text() if log.exists() else ""

    def start(self, machine: Machine, name: str, *command: str) -> subprocess.Popen[bytes]:
        return machine.start(command, self.log(name), self.env)

    @property
    def stores(self) -> str:
        """What the configuration says of the store, and of who may come."""
        return (
            f'redis_url = "redis://{self.head.address}:{REDIS_PORT}/0"\n'
            "insecure_listen = true\ninsecure_redis = true"
        )

    def start_store(self) -> None:
        where = ("--bind", self.head.address, "--port", str(REDIS_PORT), "--protected-mode", "no")
        data = ("--save", "", "--dir", str(self.folder))
        self.start(self.head, "store", valkey_binary(), *where, *data)

    def start_head(self) -> None:
        self.start_store()
        self.env |= {
            # Seconds, and not by far: machines of tests are slow now and then.
            "RAY_health_check_period_ms": "2000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "5",
        }
        where = ("--node-ip-address", self.head.address, "--port", "6379")
        little = ("--num-cpus", "0", "--include-dashboard", "false")
        folder = ("--temp-dir", f"{self.folder}/r", "--object-store-memory", str(80 << 20))
        self.start(self.head, "head", RAY, "start", "--head", "--block", *where, *little, *folder)
        self.until(lambda: "Ray runtime started" in self.text("head"), "no head")

    def join(self, machine: Machine, name: str, resource: str) -> subprocess.Popen[bytes]:
        """It has one place, for workers that ask for ``resource``."""
        given = ("--workers", "1", "--cpus", "0", "--gpus", "0", "--resource", f"{resource}=1")
        return self.start(machine, name, BATON, "join", f"{self.head.address}:6379", *given)

    def up(self, decode: int = 2, name: str = "up") -> subprocess.Popen[bytes]:
        model = make_tiny_model(self.folder / "model", context=2048, head_dim=16)
        file = self.folder / "baton.toml"
        file.write_text(
            CONFIG.format(model=model, head=self.head.address, stores=self.stores, decode=decode)
        )
        fronts = [f"--{front}={self.head.address}:{port}" for front, port in PORTS.items()]
        up = self.start(self.head, name, BATON, "serve", "--config", str(file), *fronts)
        self.until(lambda: "\nready in " in self.text(name) or up.poll() is not None, "up")
        assert up.poll() is None, self.text(name)
        return up

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + START_S
        while not holds():
            if time.monotonic() > end:
                logs = sorted(self.folder.glob("*.log"))
                said = "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)
                raise AssertionError(f"{what}: not in time\n{said}")
            time.sleep(0.1)

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, port: int = 8000
    ) -> subprocess.Popen[str]:
        url = f"{self.scheme}://{self.head.address}:{port}{path}"
        text = json.dumps(body) if body is not None else ""
        return subprocess.Popen(
            self.head.command(sys.executable, "-c", ASK, method, url, text),
            stdout=subprocess.PIPE,
            text=True,
            env=self.env | self.client_env,
        )

    def answer(self, tokens: int = TOKENS, prompt: str = "Once", port: int = 8000) -> str:
        asked = self.ask("POST", "/v1/completions", body(prompt, tokens), port)
        said, _ = asked.communicate(timeout=START_S)
        assert asked.returncode == 0, said
        return str(json.loads(said)["choices"][0]["text"])

    def streamed(self, tokens: int, begun: threading.Event) -> str:
        text = ""
        with self.ask("POST", "/v1/completions", body("Once", tokens) | {"stream": True}) as asked:
            assert asked.stdout is not None
            for line in asked.stdout:
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    begun.set()
        assert asked.returncode == 0
        return text

    def metrics(self) -> dict[str, float]:
        said, _ = self.ask("GET", "/metrics/cluster").communicate(timeout=END_S)
        lines = [line for line in said.splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def health(self) -> dict[str, Any]:
        said, _ = self.ask("GET", "/health").communicate(timeout=END_S)
        found: dict[str, Any] = json.loads(said)
        return found


class SecuredNetwork(Network):
    """One that others use, too: keys, certificates, and a Redis with TLS and users by role."""

    scheme = "https"

    def __init__(self, folder: Path, all_of_them: list[Machine]) -> None:
        super().__init__(folder, all_of_them)
        self.certs = folder / "certs"
        hosts = [word for one in all_of_them for word in ("--san", one.address)]
        self._do(BATON, "certs", "init", str(self.certs), *hosts)
        # In a deployment the CA's key is kept elsewhere.
        (self.certs / "ca.key").rename(folder / "kept.key")
        self.keys = str(folder / "keys.toml")
        made = self._do(BATON, "keys", "create", "me", "--file", self.keys, "--scope", "admin")
        trusted = {"BATON_CA": str(self.certs / "ca.pem")}
        self.client_env = trusted | {"BATON_API_KEY": made.split()[-1]}

    def _do(self, *command: str) -> str:
        return subprocess.run(
            command, env=self.env, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def url(self, user: StoreUser) -> str:
        return f"rediss://{user}:{PASSWORDS[user]}@{self.head.address}:{REDIS_PORT}/0"

    @property
    def stores(self) -> str:
        fields = {
            "redis_url": self.url("supervisor"),
            "redis_router_url": self.url("router"),
            "redis_worker_url": self.url("worker"),
            "keys_file": self.keys,
            "tls.folder": str(self.certs),
        }
        return "\n".join(f'{name} = "{value}"' for name, value in fields.items())

    def start_store(self) -> None:
        made = commands(f"{self.head.address}:{REDIS_PORT}", self.certs, self.folder)
        for name, command in zip(("store", "tls"), made, strict=True):
            self.start(self.head, name, *command)

    def from_there(self, machine: Machine, script: str, *arguments: str) -> Any:
        """What a script prints on a machine, as JSON."""
        done = subprocess.run(
            machine.command(sys.executable, "-c", script, *arguments),
            env=self.env,
            check=True,
            stdout=subprocess.PIPE,
            timeout=START_S,
        )
        return json.loads(done.stdout)


PORTS = {"http": 8000, "grpc": 8001}


def body(prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": f"{prompt} upon a time there was " * 4,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def workers_on(machine: Machine) -> list[psutil.Process]:
    """Where the engine runs, as this machine sees it: not the warm standbys.

    Ray names its processes by what they house.
    """
    found = []
    for process in machine.processes():
        try:
            if " ".join(process.cmdline()).startswith("ray::WorkerActor"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def houses_a_worker(machine: Machine) -> bool:
    return bool(workers_on(machine))


Kind = TypeVar("Kind", bound=Network)


@contextmanager
def network(count: int, kind: type[Kind]) -> Iterator[Kind]:
    # A path of a socket must be short.
    with TemporaryDirectory(prefix="baton-m", dir="/tmp") as folder, machines(count) as made:
        yield kind(Path(folder), made)


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
        assert series['baton_handoffs_total{outcome="ok",transport="grpc"}'] >= 1
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
        assert series['baton_handoffs_total{outcome="ok",transport="grpc"}'] >= 1
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
