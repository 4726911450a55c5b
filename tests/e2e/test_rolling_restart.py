"""Every worker and router of a cluster is restarted under load, and no client can tell."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from baton.client.headers import ROUTER_HEADER
from tests.support.e2e.cluster import BATON, UpProcess
from tests.support.e2e.rolling_restart import CLIENTS, DEADLINE_S, Load, answer, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[UpProcess]:
    flags = ("--prefill", "2", "--decode", "2", "--routers", "2", "--deterministic")
    with UpProcess(*flags) as up:
        yield up.wait_ready()


def addresses(up: UpProcess) -> dict[str, str]:
    """Where the workers are that routers use; another life has another address."""
    status = subprocess.run(
        [BATON, "status", "--http", up.http.removeprefix("http://")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    ).stdout
    rows = [line.split() for line in status.splitlines()]
    return {row[0]: row[3] for row in rows if len(row) > 3 and row[2] == "ready"}


def drain(up: UpProcess, name: str) -> None:
    done = subprocess.run(
        [BATON, "drain", name, "--yes", "--http", up.http.removeprefix("http://")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def restart_router(up: UpProcess, name: str) -> None:
    old = up.state.processes[name]
    drain(up, name)
    until(lambda: up.state.processes[name] != old, f"{name} did not come back")
    # The other one answers meanwhile: it may be next only when this one listens again.
    until(lambda: answers(up, name.removeprefix("router-")), f"{name} does not answer")
    audited = f'"action": "drain", "object": "{name}", "signal": "SIGTERM"'
    assert audited in (up.logs / f"{name}.log").read_text()


def answers(up: UpProcess, number: str) -> bool:
    """Whether the router of that number has answered one of some new connections, healthy."""
    with httpx.Client(
        trust_env=False, timeout=DEADLINE_S, limits=httpx.Limits(max_keepalive_connections=0)
    ) as client:
        found = [client.get(f"{up.http}/health") for _ in range(10)]
    return any(one.is_success and one.headers.get(ROUTER_HEADER) == number for one in found)


def restart_worker(up: UpProcess, slot: str) -> None:
    old = addresses(up)[slot]
    drain(up, slot)
    until(lambda: addresses(up).get(slot, old) != old, f"{slot} did not come back")


def test_everything_is_restarted_and_nothing_is_lost(own_cluster: UpProcess) -> None:
    up = own_cluster
    load = Load(up, [answer(up, number) for number in range(8)])
    workers = sorted(addresses(up))
    assert len(workers) == 4
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(load.run, first) for first in range(CLIENTS)]
        try:
            for slot in workers:
                restart_worker(up, slot)
            for name in ("router-0", "router-1"):
                with load.router_restarts():
                    restart_router(up, name)
        finally:
            load.stop.set()
        for client in running:
            client.result(DEADLINE_S)
    assert load.failed == []
    assert load.wrong == []
    assert load.answered > len(workers) * CLIENTS
    up.terminate()
    assert up.wait() == 0, up.text
