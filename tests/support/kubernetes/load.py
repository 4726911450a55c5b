"""Clients that ask while a test does things to a release, and a row about each thing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.support.kubernetes.cluster import Cluster

READY_S = 300.0
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

    def __init__(
        self, there: Cluster, service: str, folder: Path, authority: Path, key: str
    ) -> None:
        self._there, self._service = there, service
        self._folder, self._authority, self._key = folder, authority, key
        self._stop, self._counts = folder / "stop", folder / "counts"
        self._log = folder / "load.log"
        self._process: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        """Start, once the Service has its address."""
        hosts = self._folder / "hosts"
        address = self._there.address(self._service)
        hosts.write_text(f"127.0.0.1 localhost\n{address} {self._service}\n")
        url = f"https://{self._service}:8000/v1/completions"
        told = (url, self._authority, self._key, self._stop, self._counts)
        bind = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        python = (sys.executable, "-c", LOAD, *map(str, told))
        command = self._there.node.command(
            "unshare", "--mount", "bash", "-c", bind, "load", *python
        )
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        async with asyncio.timeout(READY_S):
            while self.look()["done"] < 3:
                assert self._process.returncode is None, self._text()
                await asyncio.sleep(0.2)

    def _text(self) -> str:
        return self._log.read_text()

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
        return self.look()


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
        sys.stdout.write(f"\n{self._rows[-1]}")

    def tell(self, seen: dict[str, Any]) -> None:
        head = (
            "| event | seconds until all pods are ready | requests | lost |",
            "|---|---|---|---|",
        )
        total = f"| all | | {seen['done']} | {len(seen['bad'])} |"
        sys.stdout.write("\n".join(("", *head, *self._rows, total)) + "\n")
        sys.stdout.write(f"{seen['again']} requests were sent again after a lost connection.\n")
