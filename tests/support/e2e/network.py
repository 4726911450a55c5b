"""A cluster on several machines: Ray's head and the store on the first, workers on those that join.

Each machine has its own network, its own processes and its own idea of process ids.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil

from baton.valkey_binary import valkey_binary
from deploy.store.redis_access import StoreUser
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
        self._store = self.start(self.head, "store", valkey_binary(), *where, *data)

    def restart_store(self) -> None:
        """Kill the store, and start an empty one in its place."""
        self.head.kill(self._store)
        self._store.wait(END_S)
        self.start_store()

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

    def join(
        self, machine: Machine, name: str, resource: str, *more: str
    ) -> subprocess.Popen[bytes]:
        """It has one place, for workers that ask for ``resource``."""
        given = ("--workers", "1", "--cpus", "0", "--gpus", "0", "--resource", f"{resource}=1")
        return self.start(machine, name, BATON, "join", f"{self.head.address}:6379", *given, *more)

    def is_ready(self, name: str) -> bool:
        return "\nready in " in self.text(name)

    def configure(self, decode: int, more: str = "") -> Path:
        """Write the cluster's configuration, with the lines ``more`` before its pools."""
        model = make_tiny_model(self.folder / "model", context=2048, head_dim=16)
        stores = f"{self.stores}\n{more}"
        file = self.folder / "baton.toml"
        file.write_text(
            CONFIG.format(model=model, head=self.head.address, stores=stores, decode=decode)
        )
        return file

    @property
    def fronts(self) -> list[str]:
        """The options of a router on the head's machine."""
        return [f"--{front}={self.head.address}:{port}" for front, port in PORTS.items()]

    def up(self, decode: int = 2, name: str = "up") -> subprocess.Popen[bytes]:
        file = str(self.configure(decode))
        up = self.start(self.head, name, BATON, "serve", "--config", file, *self.fronts)
        self.until_ready(up, name)
        return up

    def until_ready(self, process: subprocess.Popen[bytes], name: str) -> None:
        """Wait until ``baton serve``, whose log has this name, is ready."""
        self.until(lambda: self.is_ready(name) or process.poll() is not None, name)
        assert process.poll() is None, self.text(name)

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

    def serves(self) -> bool:
        """Whether the cluster is healthy."""
        asked = self.ask("GET", "/health")
        asked.communicate(timeout=END_S)
        return asked.returncode == 0

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


class LoggedNetwork(Network):
    """One of pods: their processes write their logs to standard output."""

    @property
    def stores(self) -> str:
        return f'{super().stores}\nlog_to = "stdout"\nlog_format = "json"\nlog_requests = true'

    def start_node(self, machine: Machine, name: str, resource: str) -> None:
        """A node that Baton does not start, as in an existing Ray cluster."""
        offered = json.dumps({"baton_worker": 1, resource: 1})
        where = ("--address", f"{self.head.address}:6379", "--node-ip-address", machine.address)
        much = ("--num-cpus", "0", "--object-store-memory", str(80 << 20))
        command = [RAY, "start", "--block", *where, *much, "--resources", offered]
        machine.start(command, self.log(name), self.env | {"RAY_LOG_TO_STDERR": "1"})

    def is_ready(self, name: str) -> bool:
        return any(row["message"].startswith("ready in ") for row in self.rows(name))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The JSON lines on the standard output of a process."""
        lines = self.text(name).splitlines(keepends=True)
        return [json.loads(line) for line in lines if line[0] == "{" and line[-1] == "\n"]

    def writers(self, name: str) -> set[str]:
        return {row["instance"] for row in self.rows(name)}


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
