"""What a shell completes: names of the clusters that this user runs here. Never an error.

It reads the clusters' state files and asks no network. So a worker on another machine is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from deploy.processes.cluster_state import ClusterState

_ROUTER = "router"


def cluster_ids(incomplete: str) -> list[tuple[str, str]]:
    """Ids, each with its model and address."""
    return [
        (one.cluster_id, f"{one.model} at {one.http}")
        for one in _clusters()
        if one.cluster_id.startswith(incomplete)
    ]


def worker_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The workers of the selected cluster."""
    return [
        name
        for name in _names(ctx)
        if _pool_of(name) not in ("", _ROUTER) and name.startswith(incomplete)
    ]


def worker_and_router_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The workers and the routers of the selected cluster."""
    names = [name for name in _names(ctx) if _pool_of(name) or name == _ROUTER]
    return [name for name in names if name.startswith(incomplete)]


def pool_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The pools that have a worker on this machine."""
    pools = {_pool_of(name) for name in _names(ctx)} - {"", _ROUTER}
    return sorted(name for name in pools if name.startswith(incomplete))


def _names(ctx: typer.Context) -> list[str]:
    """Of processes."""
    from deploy.cli.operate.cluster_selection import is_same_address  # noqa: PLC0415

    cluster_id, http = ctx.params.get("cluster"), ctx.params.get("http")
    return sorted(
        {
            name
            for one in _clusters()
            if cluster_id in (None, one.cluster_id)
            if http is None or any(is_same_address(http, at) for at in (one.http, one.operators))
            for name in one.processes
        }
    )


def _pool_of(name: str) -> str:
    """Of a worker's slot, such as decode-0: the pool; empty for a process without a number."""
    pool, _, number = name.rpartition("-")
    return pool if number.isdecimal() else ""


def _clusters() -> Iterator[ClusterState]:
    try:
        from deploy.processes.cluster_state import running_clusters  # noqa: PLC0415

        yield from running_clusters()
    except Exception:
        return
