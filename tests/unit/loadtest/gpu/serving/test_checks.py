"""What the serving phase says of a cluster that does what it must not do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from baton.errors import DeadlineExceeded
from loadtest.gpu.common.results import Check, Fact, Result, Timing
from loadtest.gpu.serving import checks
from loadtest.gpu.serving.checks import (
    MIB,
    SMALL,
    check_answers,
    check_killed_writer,
    check_poisoned_context,
    load_results,
)
from loadtest.gpu.serving.cluster import Asked, ServedTokens, ServingCluster
from loadtest.router.stream_client import StreamResult

Fields = dict[str, Any]


@dataclass
class FakeWorker:
    lives_on: bool = False
    signals: list[int] = field(default_factory=list)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    async def ended(self, deadline_s: float) -> int:
        if self.lives_on and 9 not in self.signals:
            raise DeadlineExceeded("it still runs")
        return 1


class FakeCluster:
    """Answers a request with its prompt's first tokens, over a transport of the test's choice."""

    def __init__(self) -> None:
        self.transport = "shm"
        self.hands_off = True
        self.faults: dict[int, ServedTokens] = {}
        """Answers by the place of a request, instead of the right ones, after a handoff."""
        self.memory: Fields = {}
        self.held_blocks = 0
        self.late = 0
        """Requests that are handed off only once the worker has been killed."""
        self.workers = {"prefill-0": FakeWorker(), "decode-0": FakeWorker()}
        self.received = 0
        self.replaced = 0

    async def ensure(self) -> None:
        self.replaced += 1

    async def look(self, slot: str) -> Fields:
        await asyncio.sleep(0)
        killed = bool(self.workers["prefill-0"].signals)
        return {
            "total_blocks": 100,
            "held_blocks": self.held_blocks if killed else 0,
            "running": 1,
            "received_handoffs": {self.transport: self.received},
            "received_bytes": {self.transport: 1000.0 * self.received},
            **self.memory,
        }

    async def answers(self, route: str, asked: Sequence[Asked]) -> list[ServedTokens]:
        right = [ServedTokens(one.prompt[: one.max_tokens]) for one in asked]
        if route == "local":
            return right
        if self.hands_off:
            self.received += max(1, len(asked) - self.late)
        # Later than the look at it.
        await asyncio.sleep(0.05)
        return [self.faults.get(place, one) for place, one in enumerate(right)]

    async def expected(self, asked: Sequence[Asked]) -> list[ServedTokens]:
        return await self.answers("local", asked)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(checks, "_RELEASE_S", 0.05)
    return FakeCluster()


def real(cluster: FakeCluster) -> ServingCluster:
    return cast(ServingCluster, cluster)


def broken(results: list[Result]) -> dict[str, float]:
    """The checks that do not hold."""
    return {each.name: each.error for each in results if isinstance(each, Check) and not each.holds}


async def test_answers_that_are_equal_and_handed_off_are_well(cluster: FakeCluster) -> None:
    results = await check_answers(real(cluster), SMALL)
    assert not broken(results)
    assert results[-1] == Fact("handoffs", {"transports": {"shm": 6}, "bytes": 6000.0})


async def test_an_answer_that_differs_is_found(cluster: FakeCluster) -> None:
    cluster.faults = {2: ServedTokens((1, 2, 3)), 3: ServedTokens(error="503")}
    results = await check_answers(real(cluster), SMALL)
    assert broken(results) == {"answers that differ after a handoff": 2}
    assert cast(Fact, results[-1]).values["errors"] == ["503"]


async def test_answers_without_a_handoff_prove_nothing(cluster: FakeCluster) -> None:
    cluster.hands_off = False
    assert broken(await check_answers(real(cluster), SMALL)) == {
        "answers that were not handed off": 6
    }


async def test_on_a_gpu_another_transport_than_cuda_ipc_is_found(cluster: FakeCluster) -> None:
    cluster.memory = {"free_bytes": 1, "own_bytes": 1}
    cluster.transport = "grpc"
    assert broken(await check_answers(real(cluster), SMALL)) == {
        "handoffs by another transport than cuda_ipc": 6
    }
    cluster.transport = "cuda_ipc"
    assert not broken(await check_answers(real(cluster), SMALL))


async def test_what_a_killed_writer_costs_is_found(cluster: FakeCluster) -> None:
    cluster.late = 5
    assert not broken(await check_killed_writer(real(cluster), SMALL))
    assert cluster.workers["prefill-0"].signals == [9]
    assert cluster.replaced == 1
    cluster.faults = {1: ServedTokens((9,)), 4: ServedTokens(error="the connection was lost")}
    cluster.held_blocks = 7
    cluster.workers["prefill-0"] = FakeWorker()
    results = await check_killed_writer(real(cluster), SMALL)
    # The replacement's one answer is right.
    assert broken(results) == {
        "requests lost when their writer was killed": 1,
        "tokens wrong after a killed writer": 1,
        "blocks held for a killed writer": 7,
    }


async def test_a_writer_that_is_killed_too_late_proves_nothing(cluster: FakeCluster) -> None:
    assert broken(await check_killed_writer(real(cluster), SMALL)) == {
        "handoffs that ended before the kill": 12
    }


@pytest.mark.parametrize(("freed", "kept"), [(500, 0), (430, 70), (100, 400)])
async def test_memory_that_a_killed_worker_keeps_is_found(
    cluster: FakeCluster, freed: int, kept: int
) -> None:
    """In MiB, of a worker that had 500; the decode worker has allocated 20 more meanwhile."""
    cluster.late = 5
    cluster.transport = "cuda_ipc"

    class Memory(FakeWorker):
        def signal(self, number: int) -> None:
            super().signal(number)
            cluster.memory = {"free_bytes": (1000 + freed - 20) * MIB, "own_bytes": 520 * MIB}

    cluster.memory = {"free_bytes": 1000 * MIB, "own_bytes": 500 * MIB}
    cluster.workers["prefill-0"] = Memory()
    results = await check_killed_writer(real(cluster), SMALL)
    name = "MiB of a killed worker that stay allocated"
    assert broken(results) == ({name: kept} if kept else {})
    assert Check(name, kept, 64) in results


async def test_a_poisoned_worker_that_lives_on_is_found(cluster: FakeCluster) -> None:
    results = await check_poisoned_context(real(cluster), replace(SMALL, long_answer=12))
    assert not broken(results)
    assert cluster.workers["decode-0"].signals == [10]
    cluster.workers["decode-0"] = FakeWorker(lives_on=True)
    results = await check_poisoned_context(real(cluster), SMALL)
    assert broken(results) == {"poisoned workers that live on": 1}
    timing = next(each for each in results if isinstance(each, Timing))
    assert (timing.name, timing.limit_s) == ("poisoned worker is gone", 2.0)


async def test_a_replacement_that_answers_otherwise_is_found(cluster: FakeCluster) -> None:
    cluster.faults = {0: ServedTokens((1,))}
    results = await check_poisoned_context(real(cluster), SMALL)
    assert broken(results) == {"wrong answers of a replacement decode worker": 1}


def streamed(first: float, last: float, tokens: int, error: str = "") -> StreamResult:
    return StreamResult(began=1.0, first=first, last=last, tokens=tokens, error=error)


async def test_a_load_is_timed_by_its_whole_answers_and_counts_the_others() -> None:
    answers = [
        streamed(1.5, 3.5, 11),
        streamed(1.7, 3.0, 4, "the connection was lost"),
        streamed(1.25, 5.25, 11),
        streamed(1.75, 7.75, 11),
        streamed(1.1, 3.1, 10),
    ]
    results = load_results(answers, tokens=11, concurrency=8, took_s=66.0)
    assert broken(results) == {"requests that failed at concurrency 8": 2}
    errors = ["10 tokens came", "the connection was lost"]
    told = {"ok": 3, "failed": 2, "errors": errors}
    assert Fact("requests at concurrency 8", told) in results
    assert {each.name: each.seconds for each in results if isinstance(each, Timing)} == {
        "TTFT p50 at concurrency 8": pytest.approx(0.5),
        "TPOT p50 at concurrency 8": pytest.approx(0.4),
        "time per token of all requests at concurrency 8": pytest.approx(2.0),
    }
    assert not [each for each in load_results([], 11, 8, 1.0) if isinstance(each, Timing)]
