"""The chart's modes disaggregated and kuberay, run in namespaces of this machine under load.

What is rendered is executed: commands, environment, files, users, probes, Services and rollouts,
with certificates, API keys and network policies. Each pod is lost once, pools are scaled, upgrades
are rolled out, certificates and the store's password are replaced, while clients ask.

    python -m pytest -s -m long tests/e2e/test_chart_in_namespaces.py

prints the tables of docs/lab-notes/kubernetes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from baton.host.cache import cache_dir
from tests.support.deploy.chart import CHART, KUBERNETES, RELEASE, Manifest, helm
from tests.support.kubernetes.certificates import CertificateManager
from tests.support.kubernetes.cluster import Cluster, cluster
from tests.support.kubernetes.kuberay import expanded
from tests.support.kubernetes.load import READY_S, Load, Story
from tests.support.kubernetes.pod import Pod
from tests.support.kubernetes.ray_certificates import RayCertificates
from tests.support.models import make_tiny_model

NAME = f"{RELEASE}-baton"
KEY = "example-key-of-the-test"
STORE = "example-index"
REFRESHED_S = 15.0
"""Until all pods have the files of a changed Secret."""
ASK_RAY = """
import socket, ssl, sys
address, authority, *shown = sys.argv[1:]
context = ssl.create_default_context(cafile=authority)
context.set_alpn_protocols(["h2"])
if shown:
    context.load_cert_chain(*shown)
try:
    with socket.create_connection((address, 6379), 10) as plain:
        with context.wrap_socket(plain, server_hostname=address) as sock:
            sock.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + b"\\4" + bytes(5))
            print("answered" if sock.recv(9) else "refused")
except (ssl.SSLError, ConnectionError):
    print("refused")
"""
READ_WORKERS = """
import asyncio, json, sys
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
async def read(url, cluster):
    async with redis_client(url) as client:
        found = await Registry(client, cluster).all()
    print(json.dumps({name: record.address for name, record in found.items()}))
asyncio.run(read(*sys.argv[1:]))
"""


class Release:
    """An installed release."""

    def __init__(self, folder: Path, there: Cluster, mode: str) -> None:
        self.there = there
        self._folder, self._mode, self._password = folder, mode, STORE
        self._manager = CertificateManager(folder / "authority")
        self.ray = RayCertificates(folder / "ray")
        self._certificates = self._manager.issue(self.rendered())
        self.load = Load(there, NAME, folder, self._manager.authority, KEY)
        self.story = Story(there, self.load)

    def _values(self, store: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
        pools: list[dict[str, Any]] = [
            {"name": role, "role": role, "threads": 1, "kv_pool_mib": 16}
            for role in ("prefill", "decode")
        ]
        more: dict[str, Any] = {}
        if self._mode == "kuberay":
            for pool in pools:
                pool["resources"] = {f"baton_{pool['name']}": 1}
            pools[1]["count"] = 2
            more = {
                "gcsStore": {"mode": "valkey", "password": "example-gcs"},
                "kuberay": {"tls": True},
            }
        told = {"model": "/models/tiny", "dtype": "float32", "drain_deadline_s": 10, "pools": pools}
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        key = {"name": "test", "sha256": digest, "tenant": "default"}
        return {
            "mode": self._mode,
            "config": told | config,
            "auth": {"keys": [key | {"scopes": ["inference", "admin"]}]},
            "tls": {"certManager": {"enabled": True}},
            "redis": {"mode": "valkey"} | store,
            "modelVolume": {"hostPath": {"path": str(self._folder / "models")}},
            "modelCache": {"volume": {"hostPath": {"path": str(self._folder / "cache")}}},
            "router": {"autoscaling": {"enabled": False}},
            "workers": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
        } | more

    def rendered(
        self, *, password: str = STORE, previous: str = "", **config: Any
    ) -> list[Manifest]:
        """Return the objects of the release."""
        file = self._folder / "values.yaml"
        store = {"password": password, "previousPassword": previous}
        file.write_text(yaml.safe_dump(self._values(store, config)))
        done = helm(
            "template", RELEASE, str(CHART), "--values", str(file), "--kube-version", KUBERNETES
        )
        assert done.returncode == 0, done.stderr
        found = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
        hook = "helm.sh/hook"
        return expanded(
            [one for one in found if hook not in one["metadata"].get("annotations", {})]
        )

    async def apply(self, **told: Any) -> None:
        """Do what ``helm upgrade`` does."""
        self._password = told.get("password", STORE)
        rendered = self.rendered(**told)
        secrets = self._certificates + self.ray.secrets(rendered)
        await self.there.apply(rendered + secrets)

    async def renew_certificates(self, **told: Any) -> None:
        """Give each role a new key and certificate."""
        self._certificates = self._manager.issue(self.rendered())
        await self.apply(**told)

    async def _on_node(self, program: str, *arguments: str) -> str:
        command = self.there.node.command(sys.executable, "-c", program, *arguments)
        asking = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        text, _ = await asking.communicate()
        return text.decode().strip()

    async def listener_certificates(self) -> set[str]:
        """Return the certificates that the routers show."""
        ask = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 8000)))"
        routers = self.there.pods_of(f"{NAME}-router")
        return {await self._on_node(ask, pod.address) for pod in routers}

    async def ask_ray(self, *shown: Path) -> str:
        """Connect to Ray's head by TLS, and return whether it answers to a certificate and key."""
        (head,) = self.there.pods_of(f"{NAME}-ray-head")
        paths = map(str, (self.ray.authority, *shown))
        return await self._on_node(ASK_RAY, head.address, *paths)

    async def _workers(self) -> dict[str, str]:
        """Return the workers' addresses by incarnation, as the store has them."""
        store = self.there.address(f"{NAME}-index")
        told = await self._on_node(READ_WORKERS, f"redis://:{self._password}@{store}:6379", NAME)
        found: dict[str, str] = json.loads(told or "{}")
        return found

    async def has_workers(self, count: int = 3) -> bool:
        """Whether this number of workers serves, each in a pod."""
        found = await self._workers()
        alive = {pod.address for pod in self.there.pods.values() if not pod.ending}
        return len(found) == count and all(
            one.rpartition(":")[0] in alive for one in found.values()
        )

    async def workers(self) -> set[str]:
        """Return the incarnations of the workers, once all are there."""
        async with asyncio.timeout(READY_S):
            while True:
                if await self.has_workers() and (found := await self._workers()):
                    return set(found)
                await asyncio.sleep(0.5)

    def pods_of_workers(self) -> set[str]:
        """Return the names of the pods of mode disaggregated that have a worker."""
        roles = ("prefill", "decode")
        return {pod.name for role in roles for pod in self.there.pods_of(f"{NAME}-{role}")}

    async def lose_each(self, pods: tuple[Pod, ...]) -> None:
        """Lose one pod after the other."""
        for pod in pods:
            what = f"a pod of {pod.workload.name} is lost"
            await self.story.during(what, self.there.kill(pod), self.has_workers)

    async def end(self) -> None:
        """Tell the story. No request is lost, and no connection is one that no policy allows."""
        seen = await self.load.end()
        self.story.tell(seen)
        assert seen["bad"] == []
        assert self.there.violations() == []
        assert self.there.connections


@asynccontextmanager
async def release(mode: str) -> AsyncIterator[Release]:
    with TemporaryDirectory(prefix="baton-k", dir="/tmp") as name:
        folder = Path(name)
        _prepare(folder)
        async with cluster(folder / "k") as there:
            made = Release(folder, there, mode)
            await made.apply()
            following = asyncio.create_task(made.ray.follow(there))
            try:
                await there.until_ready(READY_S)
                await made.load.begin()
                yield made
            finally:
                following.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await following


def _prepare(folder: Path) -> None:
    """Write what a node has: a model, and this machine's kernels, which it would build once."""
    folder.chmod(0o755)
    make_tiny_model(folder / "models" / "tiny", context=2048, head_dim=16)
    kernels = cache_dir() / "kernels"
    if kernels.is_dir():
        shutil.copytree(kernels, folder / "cache" / "kernels")
    (folder / "cache").mkdir(exist_ok=True)
    for each in (folder / "models", folder / "cache"):
        for path in (each, *each.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_the_disaggregated_mode_loses_no_request() -> None:
    async with release("disaggregated") as made:
        there, story = made.there, made.story
        await made.lose_each(tuple(there.pods.values()))

        await story.during("decode: 2 → 3 pods", there.scale(f"{NAME}-decode", 3))
        await story.during("decode: 3 → 2 pods", there.scale(f"{NAME}-decode", 2))

        workers = made.pods_of_workers()
        await story.during("upgrade of the routers alone", made.apply(slo_ttft_s=3.0))
        assert made.pods_of_workers() == workers
        await story.during("upgrade of all workers, too", made.apply(slo_tpot_s=0.2))
        assert not made.pods_of_workers() & workers

        await _replace_secrets(made, slo_tpot_s=0.2)
        await made.end()


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_the_kuberay_mode_loses_no_request() -> None:
    async with release("kuberay") as made:
        assert await made.ask_ray(*made.ray.files("worker")) == "answered"
        assert await made.ask_ray() == "refused"
        await made.lose_each(tuple(made.there.pods.values()))
        routers = made.apply(slo_ttft_s=3.0)
        await made.story.during("upgrade of routers and launchers", routers, made.has_workers)
        before = await made.workers()

        async def are_replaced() -> bool:
            return not before & await made.workers()

        workers = made.apply(slo_tpot_s=0.2)
        await made.story.during("upgrade of all workers, too", workers, are_replaced)
        await _replace_secrets(made, slo_tpot_s=0.2)
        await made.end()


async def _replace_secrets(made: Release, **config: Any) -> None:
    there, story = made.there, made.story
    workers, before = await made.workers(), await made.listener_certificates()

    async def are_new() -> bool:
        return not before & await made.listener_certificates()

    renewed = made.renew_certificates(**config)
    await story.during("new certificates and keys", renewed, are_new)
    second = made.apply(password="new", previous=STORE, **config)
    await story.during("the store takes a second password", second)
    await asyncio.sleep(REFRESHED_S)
    await story.during("the store forgets the first one", made.apply(password="new", **config))
    assert await made.workers() == workers, "no secret replaces a worker"
    for name in ("router", "prefill"):
        pod = next(pod for pod in there.pods.values() if pod.workload.name.endswith(name))
        what = f"a pod of {pod.workload.name} is lost, and another one uses the new secrets"
        await story.during(what, there.kill(pod), made.has_workers)
