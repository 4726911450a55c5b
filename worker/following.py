"""A rank of a worker but its first: the process beside the worker's own.

    connecting ─the group has formed→ loading ─→ ready ─steps come→ following ─rank 0 closes→ over
    any ─rank 0 is lost, or anything fails→ ``run`` raises, or ``on_lost`` is called amid a step

It has weights and KV blocks, and no sequences, calls or registry entry of its own. One thread
computes steps; where the model is divided, an event loop serves rank 0 and the ranks of peers
(``worker/rank_server.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from engine.engine import build_following, device_of
from engine.parallel.ranks import FORM_S, FollowingRank
from engine.parallel.step_channel import GroupAddress
from kvtransfer.memory import BlockMemory
from kvtransfer.transport import Transport
from worker.cores import give_way
from worker.engine_start import engine_settings
from worker.pool_memory import PoolMemory
from worker.rank_server import MakeTransports, RankServer
from worker.settings import WorkerSettings
from worker.transports import make_transports

_TRANSFER_THREADS = 2
_START_S = 10.0
_NOWHERE = "none"
"""Where a rank serves that nobody asks for anything."""

log = logging.getLogger(__name__)

OnLost = Callable[[str], None]
"""Ends the process: its thread may be inside a collective operation that waits for others."""


class FollowingWorker:
    """Rank ``rank``, from 1, of the worker that ``settings`` describe."""

    def __init__(
        self, settings: WorkerSettings, rank: int, address: GroupAddress, process: str = ""
    ) -> None:
        """``address`` is where its rank 0 listens, which is told what names this ``process``."""
        self._settings = settings
        self._rank = rank
        self._address = address
        self._process = process

    def run(self, on_lost: OnLost) -> None:
        """Compute what rank 0 says, until it closes. Blocks. Raises BatonError."""
        settings, ranks = self._settings, self._settings.pool.ranks
        built = engine_settings(settings)
        exchanges = not built.divides_context
        memory = PoolMemory(shared=exchanges and settings.config.transport in ("auto", "shm"))
        following = FollowingRank(self._address, self._rank, ranks, FORM_S, self._process)
        try:
            group = following.form(device_of(built), on_lost)
            log.info("%s: rank %d of %d loads", settings.slot, self._rank, ranks)
            model, cache = build_following(built, group, memory.allocate)
            with contextlib.ExitStack() as serving:
                # Of ranks that divide prompts rank 0 sends all of a block.
                address = _NOWHERE
                if exchanges:
                    address = serving.enter_context(self._serving(memory.of(cache)))
                following.ready(address)
                name = f"{settings.slot}: rank {self._rank} of {ranks}"
                log.info("%s is ready, and serves on %s", name, address)
                if settings.core_board:
                    give_way()
                following.run(model, cache)
        finally:
            following.close()
            memory.close()

    @contextlib.contextmanager
    def _serving(self, memory: BlockMemory) -> Iterator[str]:
        """Have the rank's blocks sent and received by an event loop of their own.

        Yields the address. What comes and goes is a copy of blocks, by threads beside it.
        """
        settings = self._settings
        with ThreadPoolExecutor(_TRANSFER_THREADS, thread_name_prefix="transfer") as transfers:

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


async def _started(
    make: MakeTransports, transfers: Executor, settings: WorkerSettings
) -> RankServer:
    server = RankServer(make, transfers, settings.host, settings.config.tls.of("worker"))
    await server.start()
    return server
