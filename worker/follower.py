"""A follower: a rank of a worker other than rank 0, in a process of its own.

    connecting ─the group has formed→ loading ─→ ready;

    ready ─steps come→ following ─rank 0 closes→ over;

    any ─rank 0 is lost, or anything fails→ ``run`` raises, or calls ``on_lost`` amid a step;

    following ─a step fails on a CUDA device, or the device is lost→ ``on_lost`` is called at once

A follower has weights and KV blocks. It has no sequences, calls or registry entry of its own. One
thread computes steps. Where the model is divided, an event loop serves rank 0 and the ranks of
peers (``worker/exchange/rank_server.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from baton.rpc.worker_plane import WorkerPlane
from engine.build import build_follower
from engine.engine import device_of
from engine.parallel.ranks import FORM_S, Follower
from engine.parallel.step_channel import GroupAddress
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.transport import Transport
from worker.cores.core_board import give_way
from worker.device.device import DeviceWatch, use_device
from worker.device.device_fault import described
from worker.device.pool_memory import PoolMemory
from worker.engine_start import engine_settings
from worker.exchange.rank_server import MakeTransports, RankServer
from worker.exchange.transports import make_transports
from worker.settings import WorkerSettings

_TRANSFER_THREADS = 2
_START_S = 10.0
_NOWHERE = "none"
"""Address that a rank reports if it serves no transfers."""

log = logging.getLogger(__name__)

OnLost = Callable[[str], None]
"""Function that ends the process at once, for the given reason. It is needed because the process's
thread may be inside a collective operation that waits for other ranks."""


class FollowerWorker:
    """Rank ``rank`` (1 or higher) of the worker that ``settings`` describe, in a process of its
    own."""

    def __init__(
        self, settings: WorkerSettings, rank: int, address: GroupAddress, process: str = ""
    ) -> None:
        """``address`` is where rank 0 listens. ``process`` is the name of this process in its
        reports to rank 0."""
        self._settings = settings
        self._rank = rank
        self._address = address
        self._process = process

    def run(self, on_lost: OnLost) -> None:
        """Compute the steps that rank 0 sends, until rank 0 closes the group. Blocks. Raises
        BatonError."""
        settings, ranks = self._settings, self._settings.pool.ranks
        built = engine_settings(settings)
        device = device_of(built)
        use_device(device)
        exchanges = not built.divides_context
        memory = PoolMemory(shared=exchanges and settings.config.transport in ("auto", "shm"))
        follower = Follower(self._address, self._rank, ranks, FORM_S, self._process)
        name = f"{settings.slot}: rank {self._rank} of {ranks}"
        watch = DeviceWatch(device, lambda reason: on_lost(f"{name} ends: {reason}"))
        try:
            group = follower.form(device, on_lost)
            log.info("%s loads the model", name)
            model, cache = build_follower(built, group, memory.allocate)
            with contextlib.ExitStack() as serving:
                # Where ranks divide prompts, rank 0 sends whole blocks.
                address = _NOWHERE
                if exchanges:
                    address = serving.enter_context(self._serving(memory.of(cache), device))
                follower.ready(address)
                log.info("%s is ready and serves on %s", name, address)
                if settings.core_board and device.type == "cpu":
                    give_way()
                watch.start()
                with _ending_at_once(name, device, on_lost):
                    follower.run(model, cache)
        finally:
            watch.stop()
            follower.close()
            memory.close()

    @contextlib.contextmanager
    def _serving(self, memory: BlockMemory, device: torch.device) -> Iterator[str]:
        """Send and receive the rank's blocks within this context. Yields the address of the server.

        The server runs on an event loop of its own. The loop only directs transfers: other threads
        copy the blocks.
        """
        settings = self._settings
        with ThreadPoolExecutor(_TRANSFER_THREADS, "transfer", use_device, (device,)) as transfers:

            def make(incarnation: str) -> Sequence[Transport]:
                return make_transports(
                    settings.config, memory, incarnation, settings.host, transfers
                )

            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="rank", daemon=True)
            thread.start()
            try:
                server = asyncio.run_coroutine_threadsafe(
                    _started(make, transfers, settings), loop
                ).result(_START_S)
                yield server.address
                asyncio.run_coroutine_threadsafe(server.close(), loop).result(_START_S)
            finally:
                loop.call_soon_threadsafe(loop.stop)
                thread.join(_START_S)
                loop.close()


@contextlib.contextmanager
def _ending_at_once(name: str, device: torch.device, on_lost: OnLost) -> Iterator[None]:
    """End the process at once if something fails within this context on a CUDA device.

    An orderly exit would wait for threads that copy blocks. These may wait forever for a device
    that is inside a collective operation.
    """
    try:
        yield
    except Exception as error:
        if device.type == "cuda":
            log.exception("%s has failed", name)
            on_lost(f"{name} ends: {described(error)}")
        raise


async def _started(
    make: MakeTransports, transfers: Executor, settings: WorkerSettings
) -> RankServer:
    config = settings.config
    plane = WorkerPlane.of(config.tls.of("worker"), config.cluster_secret)
    server = RankServer(make, transfers, settings.host, plane)
    await server.start()
    return server
