"""A session of a worker: its record, and blocks that leak."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.config.cluster import Config
from baton.errors import Unavailable
from baton.request import Geometry
from engine.roofline import Storage
from engine.scheduling.block_pool import BlockPool
from worker import session
from worker.role import Intake, WorkerContext
from worker.runtime import WorkerRuntime
from worker.session import WorkerSession, _record
from worker.settings import WorkerSettings


@pytest.mark.parametrize("storage", [None, Storage(1.0, 1.0, 300.5)])
def test_a_worker_publishes_its_model_and_what_computes_it(storage: Storage | None) -> None:
    config = Config(revision="a" * 40, dtype="float16")
    settings = WorkerSettings(
        config=config,
        pool=config.pools[0],
        slot="prefill-0",
        model_path="",
        model_name="tiny",
        redis_url="",
        cluster_id="c",
        threads=1,
    )
    engine = SimpleNamespace(
        fingerprint="f",
        cache=SimpleNamespace(
            geometry=Geometry(16, 2, 3, 64, "bfloat16"), block_size=16, block_bytes=4096
        ),
        context_length=512,
        pool=SimpleNamespace(total=10),
        storage=storage,
        quantization="int4",
        runner=SimpleNamespace(device=torch.device("cpu"), drafter="none" if storage else "ngram"),
    )
    costs = SimpleNamespace(prefill=(0.0, 0.0, 0.0), step=(0.0, 0.0, 0.0))
    runtime = SimpleNamespace(
        core=SimpleNamespace(engine=engine),
        costs=costs,
        metrics_server=SimpleNamespace(port=2),
        board=object() if storage else None,
    )
    record = _record(settings, cast(WorkerRuntime, runtime), "prefill-0:1", "127.0.0.1:1")
    assert record.revision == "a" * 40
    assert (record.quantization, record.dtype, record.device) == ("int4", "float16", "cpu")
    assert record.drafter == ("" if storage else "ngram")
    assert record.shares_cores == (storage is not None)
    assert record.gpu == ""
    # Several ranks have a part of each block; the worker knows the size of the whole.
    assert record.block_bytes == (4808 if storage else 4096)


def test_a_worker_names_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "device_uuid", lambda number: f"uuid-{number}")
    assert session._gpu(torch.device("cpu")) == ""
    assert session._gpu(torch.device("cuda", 3)) == "uuid-3"
    assert session._gpu(torch.device("cuda")) == "uuid-0"


def session_of(pool: BlockPool, **busy: bool) -> WorkerSession:
    """A session with a pool alone; ``busy``: runs, moves, loads."""
    context = SimpleNamespace(
        engine=SimpleNamespace(pool=pool),
        core=SimpleNamespace(scheduler=SimpleNamespace(is_idle=lambda: not busy.get("runs"))),
        exchange=SimpleNamespace(is_idle=lambda: not busy.get("moves")),
        tiers=SimpleNamespace(is_idle=not busy.get("loads")),
    )
    session = WorkerSession.__new__(WorkerSession)
    session.context = cast(WorkerContext, context)
    session._next_check_at = 0.0
    return session


async def test_a_session_that_ends_takes_no_work_while_its_parts_close() -> None:
    """A request that came between was answered with an internal error."""
    ended: list[str] = []
    intake = Intake()

    def part(name: str) -> Any:
        async def close(**_: float) -> None:
            with pytest.raises(Unavailable):
                intake.check()
            ended.append(name)

        return SimpleNamespace(close=close, stop=close)

    session = session_of(BlockPool(4))
    session.context = cast(WorkerContext, SimpleNamespace(intake=intake, exchange=part("exchange")))
    session.role, session.server = part("role"), part("server")
    session._unsubscribe = lambda: None
    await session.end()
    assert ended == ["role", "exchange", "server"]


@pytest.mark.parametrize("busy", [None, "runs", "moves", "loads"])
def test_a_leak_is_noticed_once_nothing_runs_nor_moves(busy: str | None) -> None:
    pool = BlockPool(4)
    session = session_of(pool, **({busy: True} if busy else {}))
    session._check_blocks(time.monotonic())
    pool.allocate(1)
    session._next_check_at = 0.0
    if busy:
        session._check_blocks(time.monotonic())
        return
    with pytest.raises(AssertionError, match="leaked"):
        session._check_blocks(time.monotonic())


def test_a_check_of_blocks_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    checks: list[float] = []

    class LargePool(BlockPool):
        def check(self) -> None:
            checks.append(now[0])
            now[0] += 0.3

    monkeypatch.setattr("worker.session.time", SimpleNamespace(monotonic=lambda: now[0]))
    session = session_of(LargePool(4))
    for _ in range(60):
        session._check_blocks(now[0])
        now[0] += 1.0
    assert checks == pytest.approx([1000.0, 1030.3])
