"""The router's process: reads its settings, and serves HTTP and gRPC until a signal ends it.

python -m router.main < settings.json
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

# gRPC reads this variable when it is imported. By default, its core logs received data unescaped,
# with control characters.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.host.background import end_tasks
from baton.host.process_tuning import keep_buffers
from baton.rpc.grpc_channel import listen
from baton.store.pin_store import PinStore
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes
from baton.telemetry.genai_metrics import GenAiMetrics
from baton.telemetry.log_file import log_to_file
from baton.telemetry.logs import Service, log_to_stream
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.tracing import end_tracing, start_tracing
from router.access.access import Access
from router.access.api_keys import KeyWatch
from router.access.rate_limits import RateLimits
from router.admin.store_memory import StoreMemory
from router.app import Application, make_application
from router.billing.ledger import Ledger
from router.console.what_if import WhatIfProgram
from router.core.accounting import RequestStats
from router.core.served_model import ServedModel
from router.dispatch.dispatcher import ClusterDispatcher
from router.inference.service import InferenceService
from router.listeners import STOP_GRACE_S, HttpServers
from router.shutdown import Shutdown
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

OTHERS_S, ALONE_S = 20.0, 2.0
"""Maximum seconds that a starting router waits for workers before it listens. The first value
applies if other routers serve meanwhile, the second if there are none."""
PARENT_POLL_S = 2.0
OWN_DESCRIPTORS = 256
"""Approximate number of files that a router opens in addition to its listeners' connections."""
SWITCH_S = 0.0005
"""Seconds after which a thread must give the interpreter lock back to the event loop. Such threads
tokenize long prompts or render metrics pages. The default of 5 ms exceeds all other delays of a
router."""
GARBAGE_OBJECTS = 10_000
"""Number of new objects after which Python's garbage collector examines the youngest objects, which
takes about 5 ms. Requests and connections leave no cycles, so only growth reaches this number."""


class RouterSettings(BaseModel):
    """Settings of a router: one line of JSON on standard input, so that no secret is on a command
    line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any]
    redis_url: str
    cluster_id: str
    model_path: str
    model_name: str
    sampling: dict[str, float] = {}
    """Sampling parameters of a demo model, for those that its folder does not set."""
    number: int = 0
    """Index of this process among the router processes that share the ports."""
    ends_with_parent: bool = True
    """Whether the router ends when its parent process, the launcher, has died."""
    replicated: bool = False
    """Whether other routers of the cluster may run on other hosts, as with ``baton router``. Files
    and batches then need a ``batch_store``."""
    log_file: str = ""
    """File of this process's log, and of its standard output and error; empty leaves them."""
    what_if: tuple[str, ...] = ()
    """The program that answers the console's what-if questions, and its arguments; empty: none."""


async def serve(settings: RouterSettings) -> None:
    """Run the router until SIGINT or SIGTERM."""
    config = Config(**settings.config)
    genai = _start_telemetry(config, settings)
    tokenizer = Tokenizer.load(Path(settings.model_path))
    metrics = RouterMetrics(
        CollectorRegistry(),
        ttft_slos_s=[config.slo_ttft_of(one.name) for one in config.classes],
        tpot_slos_s=[config.slo_tpot_s],
    )
    stats = RequestStats(metrics, genai)
    client = redis_client(settings.redis_url)
    model = _served_model(settings, config)
    dispatcher = ClusterDispatcher(
        config,
        tokenizer,
        metrics,
        stats.traffic.counts,
        Registry(client, settings.cluster_id),
        PrefixIndex(client, settings.cluster_id),
        TrafficStore(client, settings.cluster_id),
        PinStore(client, settings.cluster_id),
        PoolSizes(client, settings.cluster_id),
        model=model,
    )
    ledger = Ledger(client, settings.cluster_id, config, metrics)
    limits = RateLimits(client, settings.cluster_id, metrics, budgets=ledger.budgets)
    access = Access(config, metrics, limits, ledger)
    watch = await _watched_keys(config, access, metrics)
    service = await _service(dispatcher, tokenizer, model, stats, config, access)
    await dispatcher.start()
    application = make_application(
        dispatcher,
        service,
        stats,
        client,
        settings.cluster_id,
        budgets=ledger.budgets,
        number=settings.number,
        instance=_instance(settings),
        redis_url=settings.redis_url,
        replicated=settings.replicated,
        what_if=WhatIfProgram.of(settings.what_if),
    )
    servers, grpc_server = HttpServers(application.apps, config), application.grpc_server
    shutdown = Shutdown("router" if config.routers == 1 else f"router-{settings.number}")
    shutdown.take_signals()
    # Wait before listening: the kernel immediately gives a listening process its share of the
    # connections.
    await shutdown.until(dispatcher.settled(), OTHERS_S if config.routers > 1 else ALONE_S)
    listen(grpc_server, config.grpc, config.tls.fronts)
    await grpc_server.start()
    keep_collections_short()
    await _start_parts(application, ledger)
    serving = servers.start()
    requested = asyncio.create_task(shutdown.requested.wait())
    orphaned = asyncio.create_task(_parent_gone(settings.ends_with_parent))
    watching = [] if watch is None else [asyncio.create_task(watch.run())]
    measuring = asyncio.create_task(StoreMemory(client, metrics).run())
    ends = [*serving, requested, orphaned]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks([requested, orphaned, measuring, *watching])
        await application.batches.stop()
        # The console's streams never end by themselves.
        await application.console.close()
        await application.usage.close()
        idle = servers.leave()
        if shutdown.in_order:
            await _let_end(shutdown, dispatcher, idle, grpc_server, config.drain_deadline_s)
        await application.questions.close()
        await dispatcher.close()
        await servers.close()
        await grpc_server.stop(STOP_GRACE_S)
        await application.batches.close()
        await limits.close()
        await ledger.close()
        await client.aclose()
        await asyncio.to_thread(_end_telemetry, genai)


def _served_model(settings: RouterSettings, config: Config) -> ServedModel:
    model = ServedModel.of(
        settings.model_name,
        Path(settings.model_path),
        config.max_model_len,
        config.revision,
        config.generation_config,
        settings.sampling,
    )
    if model.sampling:
        shown = ", ".join(f"{name} {value:g}" for name, value in model.sampling.items())
        log.info("sampling parameters of requests that do not set them: %s", shown)
    return model


async def _service(
    dispatcher: ClusterDispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access,
) -> InferenceService:
    """Make the inference service, and render the first conversations with the model's template.

    Raises ConfigError if the template does not compile.
    """
    await tokenizer.start()
    service = InferenceService(dispatcher, tokenizer, model, stats, config, access)
    await service.builder.encoder.start()
    return service


def _start_telemetry(config: Config, settings: RouterSettings) -> GenAiMetrics | None:
    instance = _instance(settings)
    start_tracing(config, Service.ROUTER, instance, settings.cluster_id)
    return GenAiMetrics.start(config, Service.ROUTER, instance, settings.cluster_id)


def _instance(settings: RouterSettings) -> str:
    # Routers of other hosts, such as pods, have the same number.
    return f"router-{settings.number}@{socket.gethostname()}"


def _end_telemetry(genai: GenAiMetrics | None) -> None:
    end_tracing()
    if genai is not None:
        genai.close()


async def _start_parts(application: Application, ledger: Ledger) -> None:
    """Start the background tasks that do not belong to requests."""
    ledger.start()
    application.usage.start()
    application.questions.start()
    await application.batches.start()
    application.console.start()


async def _watched_keys(config: Config, access: Access, metrics: RouterMetrics) -> KeyWatch | None:
    """Read the file of API keys, and return the object that reloads it; None if no file is
    configured. Raises ConfigError."""
    if not config.keys_file:
        return None
    watch = KeyWatch(Path(config.keys_file), config.keys, access.set_keys, metrics)
    await watch.begin()
    return watch


async def _let_end(
    shutdown: Shutdown,
    dispatcher: ClusterDispatcher,
    serving: asyncio.Task[None],
    grpc_server: grpc.aio.Server,
    deadline_s: float,
) -> None:
    """Accept no new connections, and let running requests end.

    ``serving``: a task that ends when the HTTP server has no more requests."""
    dispatcher.leave()
    closing = asyncio.create_task(grpc_server.stop(deadline_s))

    async def idle() -> None:
        # A request whose body is still being read is only known to the HTTP server.
        await asyncio.shield(serving)
        await dispatcher.until_idle()

    await shutdown.until(idle(), deadline_s)
    await end_tasks([closing])


def keep_collections_short() -> None:
    """Exclude the objects that exist now from garbage collection. Scanning them would stop every
    answer for 0.1 s.

    Requests leave no cycles, so collections can be rarer than by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 10, 50)


async def _parent_gone(matters: bool) -> None:
    """Wait until the launcher has died. If ``matters`` is false, wait forever.

    The parent is polled, since no event reports its death and the guardian may be dead, too."""
    if not matters:
        await asyncio.Event().wait()
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110
        await asyncio.sleep(PARENT_POLL_S)
    log.error("the launcher has died: the router ends")


def main() -> None:
    """Run the router process that a launcher has started."""
    run(RouterSettings.model_validate_json(sys.stdin.readline()))


def run(settings: RouterSettings) -> None:
    """Run a router in this process until SIGINT or SIGTERM."""
    prepare(settings)
    uvloop.run(serve(settings))


def prepare(settings: RouterSettings) -> None:
    """Set up logging and the limits of this process before its event loop runs."""
    config = Config(**settings.config)
    named = config.log_level, config.log_format, Service.ROUTER, _instance(settings)
    if settings.log_file:
        log_to_file(Path(settings.log_file), *named, output=(1, 2))
    else:
        log_to_stream(sys.stdout if config.log_to == "stdout" else sys.stderr, *named)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # uvicorn logs a line for every client error.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_echo)
    keep_buffers()
    sys.setswitchinterval(SWITCH_S)
    # A text is one unit of work: passing it to another thread costs more than it saves.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _take_descriptors(2 * config.advanced.max_connections + OWN_DESCRIPTORS)


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Return whether a log record is to be kept: false if gRPC only logs a traceback about a
    client's invalid header."""
    return not str(record.msg).startswith("Invalid encoding on")


def _take_descriptors(needed: int) -> None:
    """Raise this process's limit of open files to its maximum. Log a warning if that is below
    ``needed``.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < needed:
        log.warning(
            "this process may open %d files, and needs %d for advanced.max_connections: raise"
            " `ulimit -Hn` or lower the field",
            most,
            needed,
        )


if __name__ == "__main__":
    main()
