"""`baton usage` against a router that bills: what it prints, and how it fails."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typer.testing import Result

from deploy.cli.options.exit_codes import ExitCode
from tests.support.deploy.machine import Machine, machine
from tests.support.integration.billing import (
    DAY,
    PROMPT,
    Cluster,
    Router,
    key_of,
    until_reported,
)
from tests.support.mini_cluster import free_port
from tests.support.router.front_fakes import plain_client, serve

OPERATOR = {
    "name": "op",
    "tenant": "default",
    "sha256": hashlib.sha256(b"op").hexdigest(),
    "scopes": ["admin"],
}


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Without clusters of its own."""
    # First, since it follows the system's temporary directory, too.
    tmp_path_factory.getbasetemp()
    with machine() as made:
        yield made


@asynccontextmanager
async def listening(cluster: Cluster, **config: Any) -> AsyncIterator[tuple[Router, str]]:
    """A router with an operator, and its address."""
    keys = [key_of(budget=1.0), OPERATOR]
    router = cluster.router(keys=keys, require_key=True, **config)
    async with serve(router.application()) as address:
        yield router, address


async def ask(router: Router, address: str, agents: Sequence[str]) -> None:
    """Answers of four tokens to prompts of three, and their bills."""
    shown = {"authorization": "Bearer a-key"}
    async with plain_client(base_url=f"http://{address}", headers=shown) as http:
        for agent in agents:
            body = PROMPT | {"metadata": {"agent": agent}}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
    await until_reported(router)


async def usage(here: Machine, address: str, *more: str, key: str = "op") -> Result:
    arguments = ("usage", "--http", address, "--api-key", key, *more)
    return await asyncio.to_thread(here.run, *arguments)


def table(output: str) -> list[list[str]]:
    """The words of each line of the first table, its head included."""
    _, *lines = output.split("\n\n", maxsplit=1)[0].splitlines()
    return [line.split() for line in lines]


NAMES = {"day": DAY, "tenant": "acme", "key": "k", "class": "short"}


@pytest.mark.parametrize("by", NAMES)
async def test_each_group_has_a_row(here: Machine, cluster: Cluster, by: str) -> None:
    async with listening(cluster) as (router, address):
        await ask(router, address, ["writer", "critic"])
        days = ("--start", DAY, "--end", DAY)
        result = await usage(here, address, "--by", by, *days)
        assert result.exit_code == ExitCode.OK, result.output
        assert result.stdout.startswith(f"{DAY} to {DAY} (UTC)\n")
        head, row = table(result.stdout)
        assert head[:2] == [by, "requests"]
        # One prompt token of each was cached: 2 × (2 × 1 + 1 × 0.5 + 4 × 2) $ per million.
        assert row == [NAMES[by], "2", "6", "2", "8", "0.000021", "0", "0", "-"]


async def test_agents_are_listed_with_what_they_cost_together(
    here: Machine, cluster: Cluster
) -> None:
    async with listening(cluster) as (router, address):
        await router.store.count_devices({"decode": 720_000})
        await asyncio.sleep(0.05)
        await router.store.count_devices({"decode": 720_000})
        await ask(router, address, ["writer", "critic", "writer"])
        result = await usage(here, address, "--by", "tenant,agent")
        assert result.exit_code == ExitCode.OK, result.output
        _, critic, writer, total = table(result.stdout)
        assert critic[:6] == ["acme", "critic", "1", "3", "1", "4"]
        assert writer[:6] == ["acme", "writer", "2", "6", "2", "8"]
        assert total[:6] == ["total", "3", "9", "3", "12", "0.0000315"]
        pool, hours = result.stdout.splitlines()[-1].removeprefix("device hours: ").split()
        assert pool == "decode"
        # Of at least 0.05 s.
        assert float(hours) >= 10
        own = await usage(here, address, "--by", "agent", key="a-key")
        assert own.exit_code == ExitCode.OK, own.output
        assert "device hours" not in own.stdout
        budget = own.stdout.rstrip().splitlines()[-1].split()
        assert (budget[:2], budget[-2:]) == (["key", "k"], ["1", "ok"])
        told = await usage(here, address, "--by", "agent", "--output", "json")
        report = json.loads(told.stdout)
        assert [row["agent"] for row in report["data"]] == ["critic", "writer"]
        assert report["total"]["cost"] == "0.0000315"


async def test_nothing_is_billed_yet(here: Machine, cluster: Cluster) -> None:
    async with listening(cluster) as (_, address):
        result = await usage(here, address)
        assert result.exit_code == ExitCode.OK, result.output
        _, total = table(result.stdout)
        assert total == ["total", "0", "0", "0", "0", "0", "0", "0", "-"]


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        ((), "wrong", "API key"),
        (("--by", "color"), "op", "by must list some of day, tenant, key, class, agent"),
        (("--start", "yesterday"), "op", "start must be a day"),
    ],
    ids=["key", "by", "start"],
)
async def test_what_the_router_refuses_is_said(
    here: Machine, cluster: Cluster, arguments: tuple[str, ...], key: str, says: str
) -> None:
    async with listening(cluster) as (_, address):
        result = await usage(here, address, *arguments, key=key)
        assert result.exit_code == ExitCode.FAILED
        assert f"router {address}: " in result.stderr
        assert says in result.stderr
        assert result.stdout == ""


async def test_a_router_that_does_not_answer(here: Machine) -> None:
    address = f"127.0.0.1:{free_port()}"
    result = await usage(here, address)
    assert result.exit_code == ExitCode.FAILED
    assert f"no router answers at http://{address} " in result.stderr
    assert "is the cluster running?" in result.stderr
