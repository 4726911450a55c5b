"""Measures what the streams between a router and many workers cost, at both ends.

A child process is the workers: it sends each stream a keepalive with a load snapshot per heartbeat.
This process is the router: its links, its table of workers and its view of their capacity are the
real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import NoReturn

import grpc.aio
import psutil

from baton.errors import Unavailable
from baton.host.process_tuning import keep_buffers
from baton.request import Geometry, LoadSnapshot
from baton.rpc import convert
from baton.store.registry import WorkerRecord
from baton.v1 import decode_pb2, decode_pb2_grpc
from router.admission.admission_queue import capacity_of
from router.routing.policies import make_policy
from router.routing.policy import RouteSettings
from router.routing.route_finder import TableSync
from router.routing.routing_state import RoutingState
from router.workers.worker_links import WorkerLinks

_BLOCK = 16
_PORTS = 8
"""Number of ports on which the child serves. Each link has a connection of its own."""
_DEADLINE_S = 120.0
_REPEATS = 20


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Cost of the streams from one router to its workers."""

    streams: int
    router_bytes: float
    """Memory of the router's process per stream, in bytes."""
    worker_bytes: float
    """Memory of the workers' process per stream, in bytes."""
    router_message_us: float
    """Router's processor time per keepalive, in microseconds."""
    worker_message_us: float
    refresh_us: float
    """Router's processor time to bring its table up to date, per worker, if all have changed."""
    capacity_us: float
    """Router's processor time to add up the capacity, per worker."""


async def measure_streams(streams: int, seconds: float, heartbeat_s: float) -> StreamFigures:
    """Open ``streams`` streams, and measure them for ``seconds``. Raises Unavailable if they do not
    all open."""
    keep_buffers()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(there, heartbeat_s), daemon=True
    )
    child.start()
    try:
        ports = await asyncio.to_thread(here.recv)
        workers, own = psutil.Process(child.pid), psutil.Process()
        links = WorkerLinks("router", heartbeat_s=heartbeat_s)
        before = own.memory_info().rss, workers.memory_info().rss
        records = {f"decode-{n}": worker_record(n, ports[n % len(ports)]) for n in range(streams)}
        links.update(records)
        try:
            await _all_up(links, streams)
            after = own.memory_info().rss, workers.memory_info().rss
            first = time.process_time(), _cpu_s(workers), _messages(links)
            await asyncio.sleep(seconds)
            last = time.process_time(), _cpu_s(workers), _messages(links)
            count = max(1, last[2] - first[2])
            refresh_s, capacity_s = _reads(links)
        finally:
            await links.close()
    finally:
        child.terminate()
        child.join(5)
    return StreamFigures(
        streams=streams,
        router_bytes=(after[0] - before[0]) / streams,
        worker_bytes=(after[1] - before[1]) / streams,
        router_message_us=(last[0] - first[0]) / count * 1e6,
        worker_message_us=(last[1] - first[1]) / count * 1e6,
        refresh_us=refresh_s / streams * 1e6,
        capacity_us=capacity_s / streams * 1e6,
    )


def _reads(links: WorkerLinks) -> tuple[float, float]:
    """Return the processor seconds of a refresh of the table, and of reading the capacity."""
    routing = RoutingState(make_policy("predictive", RouteSettings(_BLOCK)), _BLOCK)
    sync = TableSync(routing, links)
    sync.refresh(0.0, at_once=True)
    refresh_s = capacity_s = 0.0
    for turn in range(1, _REPEATS + 1):
        for link in links.all():
            link.load = replace(link.load, engine_steps=turn, running=turn)
        began = time.process_time()
        sync.refresh(turn * 0.1, at_once=True)
        refreshed = time.process_time()
        decode = links.usable("decode")
        capacity_of(_BLOCK, decode, decode, (1.0, 1.0, 0.0))
        refresh_s += refreshed - began
        capacity_s += time.process_time() - refreshed
    return refresh_s / _REPEATS, capacity_s / _REPEATS


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _messages(links: WorkerLinks) -> int:
    return sum(link.token_messages for link in links.all())


async def _all_up(links: WorkerLinks, streams: int) -> None:
    until = time.monotonic() + _DEADLINE_S
    while len(links.up("decode")) < streams:
        if time.monotonic() > until:
            raise Unavailable(f"{len(links.up('decode'))} of {streams} streams opened")
        await asyncio.sleep(0.1)


def worker_record(number: int, port: int) -> WorkerRecord:
    """Return the record of a decode worker on this host."""
    return WorkerRecord(
        incarnation=f"decode-{number}",
        slot=f"decode-{number}",
        role="decode",
        address=f"127.0.0.1:{port}",
        metrics_address="",
        model="",
        fingerprint="",
        geometry=Geometry(_BLOCK, 30, 3, 64, "bfloat16"),
        context_length=8192,
        total_blocks=4000,
        max_sequences=64,
    )


class _Workers(decode_pb2_grpc.DecodeServiceServicer):
    """The decode workers, all of them: streams that carry keepalives only."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: object
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        """Send a message per heartbeat, as ``decode_worker.service`` does while it is idle."""
        steps = 0
        while True:
            steps += 1
            load = LoadSnapshot(running=3, free_blocks=3000, context_tokens=900, engine_steps=steps)
            yield decode_pb2.StreamTokensResponse(load=convert.load_to_proto(load))
            await asyncio.sleep(self._heartbeat_s)

    async def Abort(self, request: object, context: object) -> decode_pb2.AbortResponse:  # noqa: N802
        """Accept an abort; there is nothing to end."""
        return decode_pb2.AbortResponse()

    def Handoffs(self, request_iterator: object, context: object) -> NoReturn:  # noqa: N802
        """No worker writes here."""
        raise NotImplementedError


def _serve(pipe: Connection, heartbeat_s: float) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_forever(pipe, heartbeat_s))


async def _serve_forever(pipe: Connection, heartbeat_s: float) -> None:
    keep_buffers()
    ports = []
    servers: list[grpc.aio.Server] = []
    for _ in range(_PORTS):
        server = grpc.aio.server()
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(_Workers(heartbeat_s), server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    pipe.send(ports)
    await asyncio.Event().wait()
