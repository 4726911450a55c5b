"""The application of a router process: creates and connects all endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import grpc.aio
import redis.asyncio

from baton.store.pin_store import PinStore
from baton.store.prefix_index import PrefixIndex
from baton.store.supervision import PoolSizes, SupervisionReport, supervision_report
from router.admin.cache import CacheApi, CacheControl, OperatorServicer
from router.admin.request_api import RequestApi, answer_router
from router.admin.router_questions import RouterQuestions
from router.admin.worker_api import ClusterApi, WorkerApi, WorkerOperatorServicer
from router.admin.worker_control import PoolScaling, WorkerControl
from router.batches.batches import Batches
from router.billing.budgets import Budgets
from router.console.api import ConsoleApi
from router.console.summary import SummaryApi
from router.console.what_if import WhatIfProgram
from router.core.accounting import RequestStats
from router.dispatch.dispatcher import ClusterDispatcher
from router.grpc.gate import make_public_server
from router.grpc.inference import add_grpc_services
from router.inference.service import InferenceService
from router.listeners import Apps
from router.prefixes.api import PrefixApi
from router.prefixes.pinning import PrefixPinning
from router.routes import Apis, Mountable, make_apps
from router.usage.api import UsageApi
from router.usage.usage_store import UsageStore

PAGE_S = 0.5
"""Maximum seconds that a metrics page or the console waits for Redis."""


@dataclass(frozen=True, slots=True)
class Application:
    """All endpoints of one router process, before the process listens."""

    apps: Apps
    grpc_server: grpc.aio.Server
    """The gRPC server, which has no port yet."""
    batches: Batches
    console: ConsoleApi
    usage: UsageApi
    questions: RouterQuestions


def make_application(
    dispatcher: ClusterDispatcher,
    service: InferenceService,
    stats: RequestStats,
    client: redis.asyncio.Redis,
    cluster_id: str,
    *,
    budgets: Budgets | None = None,
    number: int = 0,
    instance: str = "router-0",
    redis_url: str = "",
    replicated: bool = False,
    what_if: WhatIfProgram | None = None,
    more: Sequence[Mountable] = (),
) -> Application:
    """Create every endpoint, each with access checks. ``more``: further HTTP endpoints.

    ``budgets`` None means that only the configuration's budgets exist, and that no cost is charged
    to them. ``instance`` is the name of this process that operators see. ``redis_url`` is the
    address of ``client``'s server. ``replicated``: other routers of the cluster may run on other
    hosts."""
    config, access, model = service.config, service.access, service.model
    cache = CacheControl(dispatcher.workers.all, PrefixIndex(client, cluster_id), stats.metrics)
    prefixes = PrefixPinning(service, dispatcher, PinStore(client, cluster_id))
    control = WorkerControl(dispatcher.workers.all, dispatcher.workers.is_up)
    scaling = PoolScaling(config, PoolSizes(client, cluster_id), control.running)
    apis = Apis.of(service)
    batches = Batches(
        service, apis.endpoints(), stats.metrics, redis_url, cluster_id, replicated=replicated
    )
    console = ConsoleApi(
        dispatcher,
        stats,
        config,
        model.id,
        access,
        what_if,
        partial(supervision, client, cluster_id),
    )
    store = UsageStore(client, cluster_id)
    usage = UsageApi(
        store, budgets or Budgets(config, stats.metrics), dispatcher.workers, access, config
    )
    questions = RouterQuestions(
        client, cluster_id, dispatcher.router_id, partial(answer_router, stats.history, instance)
    )
    apps = make_apps(
        apis,
        dispatcher,
        stats.metrics,
        cluster_id,
        number=number,
        supervisor=partial(supervisor_page, client, cluster_id),
        more=(
            batches.api,
            CacheApi(cache, access),
            PrefixApi(service, prefixes),
            WorkerApi(control, scaling, access, config),
            ClusterApi(cluster_id, model.id, control, scaling, access),
            RequestApi(stats.history, access, questions, instance),
            console,
            usage,
            SummaryApi(console.sampler),
            *more,
        ),
    )
    server = make_public_server(access, config)
    servicers = (
        OperatorServicer(cache, access),
        WorkerOperatorServicer(control, scaling, access, config),
    )
    # If operators have a listener of their own, only that one accepts their calls.
    more_services = () if config.admin_http else servicers
    add_grpc_services(server, service, apis.tokens, dispatcher, more=more_services)
    return Application(apps, server, batches, console, usage, questions)


async def supervision(client: redis.asyncio.Redis, cluster_id: str) -> SupervisionReport | None:
    """Return what the supervisor has published; None if it is unknown."""
    try:
        async with asyncio.timeout(PAGE_S):
            return await supervision_report(client, cluster_id)
    except (redis.RedisError, TimeoutError):
        return None


async def supervisor_page(client: redis.asyncio.Redis, cluster_id: str) -> str | None:
    """Return the address of the supervisor's metrics page; None if it is unknown."""
    report = await supervision(client, cluster_id)
    return None if report is None else report.metrics_address or None
