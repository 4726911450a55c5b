"""All endpoints of a router, without a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.telemetry.metrics import RouterMetrics
from router.access.access import Access
from router.app import make_application
from router.core.accounting import RequestStats
from router.dispatch.dispatcher import ClusterDispatcher
from router.inference.service import InferenceService
from router.listeners import Apps
from tests.support.router.access_access import key
from tests.support.router.front_fakes import MODEL, tiny_tokenizer

KEYS = (key("asks", "inference"), key("reads", "metrics"), key("rules", "admin"))


@dataclass
class Gated:
    apps: Apps
    grpc: str


@asynccontextmanager
async def fronts(**fields: Any) -> AsyncIterator[Gated]:
    """All endpoints of a router whose workers and Redis are away."""
    given: dict[str, Any] = {"keys": KEYS, "require_key": True}
    config = Config(**given | fields)
    metrics = RouterMetrics(CollectorRegistry())
    stats = RequestStats(metrics)
    tokenizer = tiny_tokenizer()
    client = redis_client("redis://127.0.0.1:1")
    dispatcher = ClusterDispatcher(
        config,
        tokenizer,
        metrics,
        stats.traffic.counts,
        Registry(client, "test"),
        PrefixIndex(client, "test"),
    )
    access = Access(config, metrics)
    service = InferenceService(dispatcher, tokenizer, MODEL, stats, config, access)
    made = make_application(dispatcher, service, stats, client, cluster_id="test")
    port = made.grpc_server.add_insecure_port("127.0.0.1:0")
    await made.grpc_server.start()
    # Its stream would not end by itself.
    await made.console.close()
    try:
        yield Gated(made.apps, f"127.0.0.1:{port}")
    finally:
        await made.grpc_server.stop(0)
        await made.batches.close()
        await client.aclose()
