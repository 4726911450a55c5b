"""The chart's mode disaggregated, run in namespaces of this machine under load.

What is rendered is executed: commands, environment, files, users, probes, Services and rollouts,
with certificates, API keys and network policies. Each pod is lost once, pools are scaled, upgrades
are rolled out, certificates and the store's password are replaced, while clients ask.

    python -m pytest -s -m long tests/e2e/test_chart_in_namespaces.py

prints the table of docs/lab-notes/kubernetes.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from baton.host.cache import cache_dir
from tests.support.deploy.chart import CHART, KUBERNETES, RELEASE, Manifest, helm
from tests.support.kubernetes.certificates import CertificateManager
from tests.support.kubernetes.cluster import Cluster, cluster
from tests.support.kubernetes.pod import Pod
from tests.support.models import make_tiny_model

READY_S = 300.0
KEY = "example-key-of-the-test"
STORE = "example-index"
REFRESHED_S = 15.0
"""Until all pods have the files of a changed Secret."""
LOAD = """
import concurrent.futures, json, os, ssl, sys, time, httpx
url, authority, key, stop, counts = sys.argv[1:]
trusted = ssl.create_default_context(cafile=authority)
def client():
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(trust_env=False, timeout=150, verify=trusted, headers=headers)
def body(number):
    return {"model": "tiny", "prompt": f"{number} upon a time " * 9, "max_tokens": 48,
            "temperature": 0, "ignore_eos": True}
def ask(client, number):
    answer = client.post(url, json=body(number))
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
def run(first):
    done, again, bad = 0, 0, []
    while not os.path.exists(stop):
        number = (first + done) % 4
        for left in (1, 0):
            # A connection ends with its router; another one answers.
            try:
                with client() as one:
                    text = ask(one, number)
                break
            except httpx.HTTPError as error:
                text, again = repr(error), again + 1
                time.sleep(0.5)
        done += 1
        if text != expected[number]:
            bad.append(text[:500])
        with open(f"{counts}.{first}", "w") as file:
            json.dump({"done": done, "again": again, "bad": bad}, file)
        time.sleep(0.2)
with client() as one:
    expected = [ask(one, number) for number in range(4)]
assert all(expected) and len(set(expected)) == 4, expected
with concurrent.futures.ThreadPoolExecutor(3) as threads:
    list(threads.map(run, range(3)))
"""


class Load:
    """Clients on the node. ``look`` tells how many requests have been answered and lost."""

    def __init__(self, there: Cluster, folder: Path, authority: Path) -> None:
        self._stop, self._counts = folder / "stop", folder / "counts"
        self._log = (folder / "load.log").open("wb")
        name = f"{RELEASE}-baton"
        hosts = folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{there.address(name)} {name}\n")
        url = f"https://{name}:8000/v1/completions"
        told = (url, authority, KEY, self._stop, self._counts)
        bind = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        python = (sys.executable, "-c", LOAD, *map(str, told))
        self._command = there.node.command(
            "unshare", "--mount", "bash", "-c", bind, "load", *python
        )
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=self._log, stderr=self._log
        )
        async with asyncio.timeout(READY_S):
            while self.look()["done"] < 3:
                assert self._process.returncode is None, self._text()
                await asyncio.sleep(0.2)

    def _text(self) -> str:
        return Path(self._log.name).read_text()

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = {"done": 0, "again": 0, "bad": []}
        for file in self._counts.parent.glob(f"{self._counts.name}.*"):
            try:
                seen = json.loads(file.read_text())
            except ValueError:
                continue  # it is being written
            found = {key: found[key] + seen[key] for key in found}
        return found

    async def goes_on(self, count: int = 6) -> None:
        """Wait for some more answers."""
        before = self.look()["done"]
        async with asyncio.timeout(READY_S):
            while self.look()["done"] < before + count:
                await asyncio.sleep(0.2)

    async def end(self) -> dict[str, Any]:
        assert self._process is not None
        self._stop.touch()
        assert await self._process.wait() == 0, self._text()
        self._log.close()
        return self.look()


def values(folder: Path, store: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    pools = [
        {"name": role, "role": role, "threads": 1, "kv_pool_mib": 16}
        for role in ("prefill", "decode")
    ]
    told = {"model": "/models/tiny", "dtype": "float32", "drain_deadline_s": 10, "pools": pools}
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return {
        "mode": "disaggregated",
        "config": told | config,
        "auth": {"keys": [{"name": "test", "sha256": digest, "tenant": "default"}]},
        "tls": {"certManager": {"enabled": True}},
        "redis": {"mode": "valkey"} | store,
        "modelVolume": {"hostPath": {"path": str(folder / "models")}},
        "modelCache": {"volume": {"hostPath": {"path": str(folder / "cache")}}},
        "router": {"autoscaling": {"enabled": False}},
        "workers": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
    }


def rendered(
    folder: Path, *, password: str = STORE, previous: str = "", **config: Any
) -> list[Manifest]:
    file = folder / "values.yaml"
    store = {"password": password, "previousPassword": previous}
    file.write_text(yaml.safe_dump(values(folder, store, config)))
    done = helm(
        "template", RELEASE, str(CHART), "--values", str(file), "--kube-version", KUBERNETES
    )
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    return [one for one in found if "helm.sh/hook" not in one["metadata"].get("annotations", {})]


def prepare(folder: Path) -> None:
    """Write what a node has: a model, and this machine's kernels, which it would build once."""
    folder.chmod(0o755)
    make_tiny_model(folder / "models" / "tiny", context=2048, head_dim=16)
    shutil.copytree(cache_dir() / "kernels", folder / "cache" / "kernels")
    for each in (folder / "models", folder / "cache"):
        for path in (each, *each.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)


async def listener_certificate(there: Cluster, pod: Pod) -> str:
    ask = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 8000)))"
    asking = await asyncio.create_subprocess_exec(
        *there.node.command(sys.executable, "-c", ask, pod.address), stdout=asyncio.subprocess.PIPE
    )
    text, _ = await asking.communicate()
    return text.decode().strip()


def pods_of_workers(there: Cluster) -> set[str]:
    return {
        pod.name for role in ("prefill", "decode") for pod in there.pods_of(f"demo-baton-{role}")
    }


class Story:
    """Does one thing after another under load, and keeps a row about each."""

    def __init__(self, there: Cluster, load: Load) -> None:
        self._there, self._load = there, load
        self._rows: list[str] = []

    async def during(
        self,
        what: str,
        act: Awaitable[None],
        until: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Let it happen, and wait until all is ready, ``until`` holds and requests are answered."""
        before, began = self._load.look(), time.monotonic()
        await act
        await self._there.until_ready(READY_S)
        async with asyncio.timeout(READY_S):
            while until is not None and not await until():
                await asyncio.sleep(0.5)
        took_s = time.monotonic() - began
        await self._load.goes_on()
        now = self._load.look()
        count, lost = now["done"] - before["done"], len(now["bad"]) - len(before["bad"])
        self._rows.append(f"| {what} | {took_s:.1f} | {count} | {lost} |")

    def tell(self, seen: dict[str, Any]) -> None:
        head = (
            "| event | seconds until all pods are ready | requests | lost |",
            "|---|---|---|---|",
        )
        total = f"| all | | {seen['done']} | {len(seen['bad'])} |"
        sys.stdout.write("\n".join(("", *head, *self._rows, total)) + "\n")
        sys.stdout.write(f"{seen['again']} requests were sent again after a lost connection.\n")


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_the_disaggregated_mode_loses_no_request() -> None:
    with TemporaryDirectory(prefix="baton-k", dir="/tmp") as name:
        folder = Path(name)
        prepare(folder)
        manager = CertificateManager(folder / "authority")
        manifests = rendered(folder)
        certificates = manager.issue(manifests)

        async with cluster(folder / "k") as there:

            async def apply(**told: Any) -> None:
                await there.apply(rendered(folder, **told) + certificates)

            await apply()
            await there.until_ready(READY_S)
            load = Load(there, folder, manager.authority)
            await load.begin()
            story = Story(there, load)

            # Faults
            for victim in tuple(there.pods.values()):
                what = f"a pod of {victim.workload.name} is lost"
                await story.during(what, there.kill(victim))

            # Sizes
            await story.during("decode: 2 → 3 pods", there.scale("demo-baton-decode", 3))
            await story.during("decode: 3 → 2 pods", there.scale("demo-baton-decode", 2))

            # Upgrades
            workers = pods_of_workers(there)
            await story.during("upgrade of the routers alone", apply(slo_ttft_s=3.0))
            assert pods_of_workers(there) == workers
            await story.during("upgrade of all workers, too", apply(slo_tpot_s=0.2))
            assert not pods_of_workers(there) & workers

            # Secrets
            workers = pods_of_workers(there)
            routers = there.pods_of("demo-baton-router")
            before = {await listener_certificate(there, pod) for pod in routers}
            certificates[:] = manager.issue(manifests)

            async def are_new() -> bool:
                return not before & {await listener_certificate(there, pod) for pod in routers}

            await story.during("new certificates and keys", apply(slo_tpot_s=0.2), are_new)
            (one,) = there.pods_of("demo-baton-prefill")
            await story.during("a worker with new certificates replaces one", there.kill(one))
            workers = pods_of_workers(there)
            both = apply(slo_tpot_s=0.2, password="new", previous=STORE)
            await story.during("the store takes a second password", both)
            await asyncio.sleep(REFRESHED_S)
            await story.during(
                "the store forgets the first one", apply(slo_tpot_s=0.2, password="new")
            )
            (one, *_) = there.pods_of("demo-baton-router")
            await story.during("a router with the new password replaces one", there.kill(one))
            assert pods_of_workers(there) == workers

            seen = await load.end()
            story.tell(seen)
            assert seen["bad"] == []
            assert there.violations() == []
            assert there.connections
