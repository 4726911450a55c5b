"""All ranks of a worker in one process, a thread each: as real as processes to gloo, and cheap."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from engine.build import build_engine, build_follower
from engine.engine import Engine, EngineSettings
from engine.kv.kv_cache import KvCache
from engine.parallel.ranks import Follower, Leader

HOST = "127.0.0.1"
CPU = torch.device("cpu")
WAIT_S = 60.0


@contextlib.contextmanager
def engine_of_ranks(settings: EngineSettings, ranks: int) -> Iterator[tuple[Engine, list[KvCache]]]:
    """Rank 0's engine, and the caches of all ranks."""
    leader = Leader(HOST, ranks)
    broken: list[str] = []
    caches: list[Future[KvCache]] = [Future() for _ in range(ranks)]
    ended: list[Future[None]] = [Future() for _ in range(1, ranks)]

    def follow(rank: int) -> None:
        try:
            follower = Follower(leader.address, rank, ranks, WAIT_S)
            group = follower.form(CPU, broken.append)
            model, cache = build_follower(settings, group)
            caches[rank].set_result(cache)
            follower.ready(f"rank {rank}")
            follower.run(model, cache)
            follower.close()
            ended[rank - 1].set_result(None)
        except BaseException as error:
            ended[rank - 1].set_exception(error)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, ranks)]
    for thread in threads:
        thread.start()
    try:
        leading = leader.form(CPU, WAIT_S)
        engine = build_engine(settings, ranks=leading)
        caches[0].set_result(engine.cache)
        assert leader.addresses(WAIT_S) == tuple(f"rank {rank}" for rank in range(1, ranks))
        yield engine, [cache.result(WAIT_S) for cache in caches]
    finally:
        leader.close()
        for thread in threads:
            thread.join(WAIT_S)
    for end in ended:
        end.result(0)
    assert not broken
