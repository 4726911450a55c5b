"""All that a router process shows to its clients and operators, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import grpc.aio
import redis.asyncio

from baton.config.cluster import Config
from baton.rpc.grpc_channel import make_server
from baton.store.prefix_index import PrefixIndex
from baton.store.supervision import PoolSizes, supervision_page
from router.access.access import Access
from router.admin.cache import CacheApi, CacheControl, OperatorServicer
from router.admin.worker_api import ClusterApi, WorkerApi, WorkerOperatorServicer
from router.admin.worker_control import PoolScaling, WorkerControl
from router.batches.batches import Batches
from router.console.api import ConsoleApi
from router.console.what_if import WhatIfProgram
from router.core.request_recorder import RequestStats
from router.core.served_model import ServedModel
from router.dispatch.dispatcher import ClusterDispatcher
from router.grpc.gate import GrpcGate
from router.grpc.inference import add_grpc_front
from router.http_app import Apps, Mountable, create_apps
from router.text.tokenizer import Tokenizer

PAGE_S = 0.5
"""The longest that a page of metrics waits for Redis."""


@dataclass(frozen=True, slots=True)
class Fronts:
    """Nothing of it listens yet."""

    apps: Apps
    grpc_server: grpc.aio.Server
    """Without a port."""
    batches: Batches
    console: ConsoleApi


def make_fronts(
    dispatcher: ClusterDispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access,
    client: redis.asyncio.Redis,
    cluster_id: str,
    *,
    number: int = 0,
    what_if: WhatIfProgram | None = None,
    more: Sequence[Mountable] = (),
) -> Fronts:
    """Every endpoint, each behind a gate; ``more`` are added to those of HTTP."""
    cache = CacheControl(dispatcher.workers.all, PrefixIndex(client, cluster_id), stats.metrics)
    control = WorkerControl(dispatcher.workers.all, dispatcher.workers.is_up)
    scaling = PoolScaling(config, PoolSizes(client, cluster_id))
    parts = (dispatcher, tokenizer, model, stats, config, access)
    batches = Batches(*parts)
    console = ConsoleApi(dispatcher, stats, config, model.id, access, what_if)
    apps = create_apps(
        *parts,
        number=number,
        supervisor=partial(supervisor_page, client, cluster_id),
        more=(
            batches.api,
            CacheApi(cache, access),
            WorkerApi(control, scaling, access, config),
            ClusterApi(cluster_id, model.id, control, scaling, access),
            console,
            *more,
        ),
    )
    server = make_server(shares_port=config.routers > 1, gates=(GrpcGate(access),))
    add_grpc_front(
        server,
        *parts,
        more=(
            OperatorServicer(cache, access),
            WorkerOperatorServicer(control, scaling, access, config),
        ),
    )
    return Fronts(apps, server, batches, console)


async def supervisor_page(client: redis.asyncio.Redis, cluster_id: str) -> str | None:
    """Where the supervisor's metrics are, None where that is not known."""
    try:
        async with asyncio.timeout(PAGE_S):
            return await supervision_page(client, cluster_id)
    except (redis.RedisError, TimeoutError):
        return None
