"""The router's process: reads its settings, serves HTTP and gRPC until it is told to stop.

python -m router.main < settings.json
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import redis.asyncio
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from baton.background import end_tasks
from baton.config import Config, split_host_port
from baton.grpc_channel import make_server
from baton.metrics import RouterMetrics
from baton.pool_sizes import PoolSizes
from baton.prefix_index import PrefixIndex
from baton.redis_client import redis_client
from baton.registry import Registry
from baton.supervision_page import supervision_page
from baton.traffic_board import TrafficBoard
from router.access import Access
from router.batches.batches import Batches
from router.cache_control import CacheControl
from router.dispatcher import ClusterDispatcher
from router.grpc_front import add_grpc_front
from router.http_app import create_app
from router.http_protocol import http_protocol
from router.leaving import Leaving
from router.operator_api import OperatorApi, Operators, OperatorServicer
from router.pool_scaling import PoolScaling
from router.rate_limits import RateLimits
from router.served_model import ServedModel
from router.tokenizer import Tokenizer
from router.worker_control import WorkerControl
from router.worker_operations import WorkerOperations, WorkerOperatorServicer

log = logging.getLogger(__name__)

STOP_GRACE_S = 2
"""How long open connections have to end once the router stops."""
OTHERS_S, ALONE_S = 20.0, 2.0
"""How long a router that begins may look for the workers before it listens: where others serve
meanwhile, and where there are none."""
PARENT_POLL_S = 2.0
PAGE_S = 0.5
"""The longest that a page of metrics waits for Redis."""
SWITCH_S = 0.0005
"""How soon the event loop has the interpreter's lock back from a thread that tokenises a long
prompt or draws a metrics page; the default of 5 ms is longer than all else that a router adds."""
GARBAGE_OBJECTS = 50_000
"""New objects that may be left before the youngest are looked through: about 1 ms of work."""


class RouterSettings(BaseModel):
    """One line of JSON on standard input: no secret is on a command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any]
    redis_url: str
    cluster_id: str
    model_path: str
    model_name: str
    number: int = 0
    """Of this process, among those that share the ports."""


class _Server(uvicorn.Server):
    """Leaves signals to ``serve``, which stops everything in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: RouterSettings) -> None:
    """Serve until SIGINT or SIGTERM."""
    config = Config(**settings.config)
    tokenizer = Tokenizer.load(Path(settings.model_path))
    metrics = RouterMetrics(CollectorRegistry())
    client = redis_client(settings.redis_url)
    index = PrefixIndex(client, settings.cluster_id)
    dispatcher = ClusterDispatcher(
        config,
        tokenizer,
        metrics,
        Registry(client, settings.cluster_id),
        index,
        TrafficBoard(client, settings.cluster_id) if config.autoscaler.enabled else None,
    )
    await dispatcher.start()
    folder = Path(settings.model_path)
    model = _served(settings.model_name, folder)
    limits = RateLimits(client, settings.cluster_id, metrics)
    access = Access(config, metrics, limits)
    cache = CacheControl(dispatcher.workers.all, index, metrics)
    operators = Operators(config, access)
    control = WorkerControl(dispatcher.workers.all, dispatcher.workers.is_up)
    scaling = PoolScaling(config.pools, PoolSizes(client, settings.cluster_id))
    batches = Batches(dispatcher, tokenizer, model, metrics, config, access)
    app = create_app(
        dispatcher,
        tokenizer,
        model,
        metrics,
        config,
        access,
        number=settings.number,
        supervisor=partial(supervisor_page, client, settings.cluster_id),
        more=(
            batches.api,
            OperatorApi(cache, operators),
            WorkerOperations(control, scaling, operators, config),
        ),
    )
    http = _Server(
        uvicorn.Config(
            app,
            http=http_protocol(config.slow_client_s),
            log_config=None,
            access_log=False,
            # Nothing asks for a client's address.
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=int(config.drain_deadline_s) + STOP_GRACE_S,
        )
    )
    shares_port = config.routers > 1
    grpc_server = make_server(shares_port=shares_port)
    add_grpc_front(
        grpc_server,
        dispatcher,
        tokenizer,
        model,
        metrics,
        config,
        access,
        more=(
            *batches.services,
            OperatorServicer(cache, operators),
            WorkerOperatorServicer(control, scaling, operators, config),
        ),
    )
    leaving = Leaving()
    leaving.take_signals()
    # The kernel gives a process that listens its share of the connections, whatever it knows.
    await leaving.until(dispatcher.settled(), OTHERS_S if shares_port else ALONE_S)
    grpc_server.add_insecure_port(config.grpc)
    await grpc_server.start()
    listening = _listen(config.http, shares_port=shares_port)
    _keep_collections_short()
    await batches.start()
    serving = asyncio.create_task(http.serve(sockets=[listening]))
    told = asyncio.create_task(leaving.told.wait())
    orphaned = asyncio.create_task(_parent_gone())
    try:
        await asyncio.wait([serving, told, orphaned], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks([told, orphaned])
        await batches.stop()
        http.should_exit = True
        if leaving.in_order:
            await _let_end(leaving, dispatcher, serving, grpc_server, config.drain_deadline_s)
        await dispatcher.close()
        await serving
        await grpc_server.stop(STOP_GRACE_S)
        await batches.close()
        await limits.close()
        await client.aclose()


async def supervisor_page(client: redis.asyncio.Redis, cluster_id: str) -> str | None:
    """Where the supervisor's metrics are, None where that is not known."""
    try:
        async with asyncio.timeout(PAGE_S):
            return await supervision_page(client, cluster_id)
    except (redis.RedisError, TimeoutError):
        return None


async def _let_end(
    leaving: Leaving,
    dispatcher: ClusterDispatcher,
    serving: asyncio.Task[None],
    grpc_server: grpc.aio.Server,
    deadline_s: float,
) -> None:
    """Take no new connections, and give the requests that run their time.

    ``serving`` ends when the HTTP server has no request any more.
    """
    dispatcher.leave()
    closing = asyncio.create_task(grpc_server.stop(deadline_s))

    async def idle() -> None:
        # One whose body is still read is nowhere else known yet.
        await asyncio.shield(serving)
        await dispatcher.until_idle()

    await leaving.until(idle(), deadline_s)
    await end_tasks([closing])


def _keep_collections_short() -> None:
    """What was loaded stays: looking through it for garbage would stop every answer for 0.1 s.

    A request leaves few cycles behind, so that they may gather for longer than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 20, 50)


async def _parent_gone() -> None:
    """Return when the launcher has died: no event tells, and its guardian may be dead too."""
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(PARENT_POLL_S)
    log.error("the launcher is gone: the router ends")


def _served(name: str, folder: Path) -> ServedModel:
    """With the model's own context; the workers may have room for less, which they tell."""
    config = json.loads((folder / "config.json").read_text())
    context, hidden = config["max_position_embeddings"], config["hidden_size"]
    return ServedModel(name, int(time.time()), int(context), int(hidden))


def _listen(address: str, *, shares_port: bool) -> socket.socket:
    host, port = split_host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol said: asyncio switches Nagle's algorithm off only where it knows that it is
    # TCP, and an answer's second packet would wait 40 ms for the client's acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((host, port))
    return listening


def main() -> None:
    """Entry point of the process."""
    settings = RouterSettings.model_validate_json(sys.stdin.readline())
    logging.basicConfig(
        level=str(settings.config.get("log_level", "info")).upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sys.setswitchinterval(SWITCH_S)
    # A text is one piece of work: to hand it to another thread costs more than it spares.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
