"""What a worker process watches over."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import redis
import torch

from baton.config.advanced import AdvancedConfig
from baton.errors import WorkerFailed
from baton.host.background import end_tasks
from baton.store.registry import DRAINING, Registry, WorkerRecord
from engine.parallel.ranks import Leader
from worker.core.gauges import WorkerGauges
from worker.process import LEAVE_S, WorkerProcess
from worker.registry.own_entry import OwnEntry
from worker.registry.own_lease import OwnLease
from worker.role import Intake, Role, WorkerContext
from worker.runtime import WorkerRuntime
from worker.session import WorkerSession
from worker.settings import WorkerSettings


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
async def test_a_lost_rank_ends_a_worker_on_gpus_at_once(device: str) -> None:
    """On the thread that has noticed. On CPUs it stops in order: ``run`` raises why."""
    reasons: list[str] = []
    process = WorkerProcess.__new__(WorkerProcess)
    process._fail, process._tasks, process._stopped = reasons.append, [], asyncio.Event()
    process.settings = cast(WorkerSettings, SimpleNamespace(slot="decode-0"))
    lost: Future[str] = Future()
    process._watch_ranks(cast(Leader, SimpleNamespace(lost=lost)), torch.device(device))
    assert not reasons
    lost.set_result("rank 1 has ended\nand more")
    if device == "cpu":
        with pytest.raises(WorkerFailed, match="rank 1 has ended"):
            await process.run()
        assert not reasons
    else:
        assert reasons == ["worker decode-0 ends: rank 1 has ended"]


# Its registry entry


class Asked:
    """Stands for the registry: answers as the test says, and never where it says nothing."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer: bool | Exception | None = None

    async def put(self, record: object, ttl_s: float, *, renew: bool) -> bool:
        self.calls += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return bool(self.answer)


@dataclass
class Record:
    incarnation: str = "decode-0:1"
    state: str = "ready"
    load: object = None


class Living:
    """A process with a session whose parts count their heartbeats, and a registry."""

    def __init__(self, heartbeat_s: float = 0.001) -> None:
        self.registry = Asked()
        self.beats = 0
        self.intake = Intake()
        session = self.session = WorkerSession.__new__(WorkerSession)
        context = SimpleNamespace(
            settings=SimpleNamespace(pool=SimpleNamespace(ranks=1)),
            incarnation="decode-0:1",
            intake=self.intake,
            exchange=SimpleNamespace(
                heartbeat=self._beat,
                check_ranks=lambda: None,
                pairs=dict,
                in_flight_bytes=0,
                staging=dict,
                is_idle=lambda: False,
            ),
            core=SimpleNamespace(
                load=lambda: None,
                pool=None,
                scheduler=SimpleNamespace(is_idle=lambda: False),
            ),
        )
        session.context = cast(WorkerContext, context)
        session.record = cast(WorkerRecord, Record())

        async def heartbeat() -> None:
            self.beats += 1

        session.role = cast(Role, SimpleNamespace(heartbeat=heartbeat))
        gauges = mock.create_autospec(WorkerGauges, instance=True)
        runner = SimpleNamespace(device=torch.device("cpu"))
        core = SimpleNamespace(engine=SimpleNamespace(runner=runner))
        session.runtime = cast(WorkerRuntime, SimpleNamespace(gauges=gauges, core=core))
        session._device_shown_at = 0.0
        session._next_check_at = math.inf
        process = self.process = WorkerProcess.__new__(WorkerProcess)
        config = SimpleNamespace(advanced=AdvancedConfig(heartbeat_s=heartbeat_s))
        process.settings = cast(WorkerSettings, SimpleNamespace(config=config, slot="decode-0"))
        process._entry = OwnEntry(
            cast(Registry, self.registry),
            ttl_s=4.0,
            heartbeat_s=heartbeat_s,
            record=process._current_record,
            timed=contextlib.nullcontext,
            lost=process._lost_entry,
        )
        process._entry._lease = OwnLease(4.0, 1.0)
        process._session = session
        process._lapsed_by = process.leave_by = None
        process.beats = 0
        process.drained = False
        process._changing, process._condemned = asyncio.Lock(), asyncio.Event()

    def _beat(self) -> None:
        self.beats += 1

    def stand_still(self) -> None:
        """For longer than the entry lives."""
        lease = self.process._entry._lease
        now = time.monotonic()
        lease.beat(now - 60.0)
        lease.renewed(now - 60.0)
        assert lease.beat(now)


@pytest.fixture
async def living() -> AsyncIterator[Living]:
    """A life whose tasks end with the test."""
    living = Living()
    before = asyncio.all_tasks()
    yield living
    await end_tasks(asyncio.all_tasks() - before - {asyncio.current_task()})


async def test_what_was_promised_is_renewed_while_the_registry_never_answers(
    living: Living,
) -> None:
    process = living.process
    register = asyncio.create_task(process._entry.keep())
    heartbeat = asyncio.create_task(process._heartbeat())
    async with asyncio.timeout(20.0):
        while living.beats < 20 or not living.registry.calls:
            await asyncio.sleep(0)
    assert process.beats >= 9, "its process is taken for stuck"
    await end_tasks([register, heartbeat])


async def test_a_call_to_the_registry_has_one_deadline(
    living: Living, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.registry.own_entry.CALL_S", 0.01)
    async with asyncio.timeout(20.0):
        await living.process._entry.write()
    assert not living.process._entry._lease.registered
    living.registry.answer = True
    await living.process._entry.write()
    assert living.process._entry._lease.registered


@pytest.mark.parametrize("answer", [True, redis.ConnectionError("away")])
async def test_a_worker_that_stood_still_lives_on_unless_the_registry_says_otherwise(
    living: Living, answer: bool | Exception
) -> None:
    living.stand_still()
    living.registry.answer = answer
    await living.process._entry.write()
    assert living.process._lapsed_by is None
    assert not living.process._condemned.is_set()
    assert living.intake.is_open
    assert living.process._entry._lease.stood_still is (answer is not True)


async def test_a_worker_that_stood_still_alone_ends_its_life_at_once(living: Living) -> None:
    """The registry confirmed it after it continued, however long that took."""
    process, ends = living.process, []

    async def replace_session(reason: str) -> None:
        ends.append(reason)
        process._lapsed_by = None

    process._replace_session = replace_session  # type: ignore[method-assign]
    living.stand_still()
    living.registry.answer = redis.ConnectionError("away")
    await process._entry.write()
    living.registry.answer = False
    await process._entry.write()
    assert process._condemned.is_set()
    assert not living.intake.is_open
    await process._replace_lapsed(time.monotonic())
    assert ends == ["the registry says that its lease has lapsed"]


async def test_a_worker_that_the_registry_alone_has_lost_ends_what_it_runs(living: Living) -> None:
    living.process._entry._lease.renewed(time.monotonic())
    living.registry.answer = False
    await living.process._entry.write()
    assert living.session.record.state == DRAINING
    assert living.process._lapsed_by is not None
    assert living.process._lapsed_by > time.monotonic() + LEAVE_S / 2


async def test_a_worker_that_is_drained_goes_on_when_its_entry_lapses(living: Living) -> None:
    """Its event loop still runs what ends the drain."""
    process = living.process
    async with process._changing:
        task = asyncio.create_task(process._heartbeat())
        await asyncio.sleep(0)
        process._lost_entry(True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert process.beats <= 5
        assert not task.done()


# Another role


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_role_changes_once_the_engine_has_ended_the_steps_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr("worker.process.ENGINE_HANG_S", 0.02 if hangs else 20.0)
    monkeypatch.setattr("worker.process.STOP_DEADLINE_S", 0.0)
    reasons: list[str] = []
    looks = iter(range(1000))
    scheduler = SimpleNamespace(is_idle=lambda: not hangs and next(looks) == 3)
    process = WorkerProcess.__new__(WorkerProcess)
    process._fail = reasons.append
    process.settings = cast(WorkerSettings, SimpleNamespace(slot="decode-0"))
    context = cast(WorkerContext, SimpleNamespace(core=SimpleNamespace(scheduler=scheduler)))
    if not hangs:
        await process._steps_ended(context)
        assert next(looks) == 4, "it has waited for them"
        assert not reasons
        return
    with pytest.raises(WorkerFailed, match="has not finished the steps"):
        await process._steps_ended(context)
    assert reasons == [
        "worker decode-0 ends: its engine has not finished the steps of its previous role"
    ]
