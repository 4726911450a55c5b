"""Where requests are placed, and what becomes of attempts that fail. Workers are fakes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from baton import hashing
from baton.config.advanced import AdvancedConfig
from baton.config.cluster import Config
from baton.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    FingerprintGone,
    GrammarFailed,
    HandoffError,
    NoRoom,
    PoisonRequest,
    StepFailed,
    Unavailable,
    WorkerFailed,
)
from baton.hashing import HashChain
from baton.logprobs import TokenLogprobs
from baton.request import (
    LOWEST_PRIORITY,
    FinishReason,
    Geometry,
    LoadSnapshot,
    Principal,
    TokenOutput,
)
from baton.sampling_params import SamplingParams
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import prefill_pb2, worker_pb2
from router.admission.admission_queue import AdmissionQueue
from router.core.request import GenerationRequest, ModelBinding
from router.dispatch import failover as failover_module
from router.dispatch.failover import MAX_FAILURES, Failover
from router.dispatch.hang_detector import HangDetector
from router.dispatch.placement import Placement
from router.dispatch.retry_limits import PROGRESS_TOKENS, QUARANTINE_S, Quarantine, RetryBudget
from router.dispatch.running_request import RunningRequest
from router.routing.pinned_prefixes import PinnedPrefixes
from router.routing.policy import Decision, RouteRequest, RouteSettings
from router.routing.room import HeldRoom
from router.routing.room_claims import RoomClaims
from router.routing.route_finder import RouteFinder
from router.routing.routing_state import RoutingState
from router.routing.worker_table import WorkerTable
from router.text.output_processor import ByteDetokenizer, OutputProcessor
from router.workers import breaker as breaker_module
from router.workers.breaker import Breaker
from router.workers.worker_link import WorkerLink
from router.workers.worker_links import WorkerLinks

DEADLINE_S = 10.0
PROMPT = (5, 6, 7)
SAMPLING = SamplingParams(max_tokens=50)


class Stream:
    """A prefill stream on which nothing comes but what a test says."""

    def __init__(self) -> None:
        self.breaks = 0
        self.messages = 0
        self.started: list[prefill_pb2.PrefillRequest] = []
        self._failure: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()

    def fail(self, error: BatonError) -> None:
        """What is on it now fails."""
        self._failure.set_result(error)
        self._failure = asyncio.get_running_loop().create_future()

    async def run(
        self, message: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        self.started.append(message)
        raise await asyncio.shield(self._failure)
        yield prefill_pb2.PrefillResponse()


class Link:
    """A worker."""

    def __init__(self, name: str, role: str, fingerprint: str = "f") -> None:
        self.record = SimpleNamespace(
            incarnation=name, address=f"{name}:1", role=role, slot=name, fingerprint=fingerprint
        )
        self.prefills = Stream()
        self.breaker = Breaker()
        self.messages = 0
        self.is_up = True
        self.suspected = False
        self.load = self.engine_load = LoadSnapshot(name)
        self.failed_at: float | None = None
        self.connected = True

    def failed(self, now: float) -> None:
        self.failed_at = now

    def suspect(self, now: float) -> None:
        self.suspected = True

    def stall(self) -> None:
        self.suspected = True

    def hangs(self, now: float) -> bool:
        return self.suspected


@dataclass
class Asked:
    """What was to be routed."""

    request: RouteRequest
    reads_cache: bool
    source_worker: str
    is_moved: bool


class Promised:
    """What a worker was promised of a request."""

    def __init__(self) -> None:
        self.is_computed = False

    def computed(self, now: float, **_: float) -> None:
        self.is_computed = True

    def ended(self, now: float) -> None:
        self.computed(now)


class World:
    """Two workers of each role; routes go to the first that is not excluded."""

    def __init__(
        self, *, max_moves: int | None = None, quarantine_s: float = QUARANTINE_S, **changes: Any
    ) -> None:
        self.links = {
            f"{role[0]}{n}": Link(f"{role[0]}{n}", role)
            for role in ("prefill", "decode")
            for n in range(2)
        }
        self.aborted: list[tuple[str, int, int | None]] = []
        self.cut_off = False
        self.asked: list[Asked] = []
        self.hashed: list[tuple[tuple[int, ...], HashChain]] = []
        self.listeners: list[tuple[Any, Any]] = []
        self.readers: dict[tuple[str, int], Any] = {}
        self.metrics = RouterMetrics(CollectorRegistry())
        table = WorkerTable()
        for link in self.links.values():
            if link.record.role == "decode":
                table.add(record_of(link.record.incarnation))
                table.set_up(link.record.incarnation, True)
        routing = SimpleNamespace(promise=lambda *_: Promised(), table=table)
        self.waits: list[tuple[str, bool]] = []
        """Requests that waited for room, and whether they migrate."""
        self.turn: asyncio.Future[HeldRoom | None] = asyncio.get_running_loop().create_future()
        """Turn of the request that waits for room."""
        self.rooms = RoomClaims(RouteSettings(), table)
        self.has_room = True
        self.uncached = 0
        """Number of prompt tokens that no worker has cached, as far as routing knows."""
        config, links = Config(**changes), cast(WorkerLinks, self)
        self.placement = Placement(
            "router",
            config,
            links,
            cast(RoutingState, routing),
            cast(RouteFinder, self),
            self.rooms,
            cast(AdmissionQueue, self),
            PinnedPrefixes(None, config.block_size),
            self.metrics,
        )
        self.budget = RetryBudget.of(config) if max_moves is None else RetryBudget(0, max_moves, 0)
        self.quarantine = Quarantine(quarantine_s)
        self.failover = Failover(config, self.placement, links, self.budget, self.quarantine)
        self.detector = HangDetector(config, links, self.placement, self.failover)

    # As links

    def get(self, name: str) -> Link | None:
        return self.links.get(name)

    async def abort(
        self, name: str, request_id: str, attempt: int, *, stop: bool, choice: int | None = None
    ) -> None:
        self.aborted.append((name, attempt, choice))

    def subscribe(
        self, *, on_broken: Any, on_draining: Any, on_granted: Any = None
    ) -> Callable[[], None]:
        self.listeners.append((on_broken, on_draining))
        self.on_granted = on_granted or self.on_granted
        return self.listeners.clear

    on_granted: Any = None

    # As the admission queue

    async def wait_for_room(
        self, request: GenerationRequest, deadline: float, blocks: int, *, migrates: bool
    ) -> HeldRoom | None:
        self.waits.append((request.request_id, migrates))
        return await self.turn

    def placed(self, request_id: str) -> None: ...

    def accepted(self, request_id: str) -> None: ...

    def granted(self, room: HeldRoom, classes: frozenset[str]) -> bool:
        if not self.waits or self.turn.done():
            return False
        self.turn.set_result(room)
        return True

    def read(
        self, request_id: str, attempt: int, on_output: Any, on_lost: Any, on_tokens: Any
    ) -> Callable[[], None]:
        name = request_id, attempt
        self.readers[name] = on_output, on_lost
        return lambda: self.readers.pop(name)

    def is_dead(self, name: str) -> bool | None:
        return WorkerLinks.is_dead(cast(WorkerLinks, SimpleNamespace(_links=self.links)), name)

    def is_up(self, link: Link) -> bool:
        return link.is_up

    def is_cut_off(self, fingerprint: str = "") -> bool:
        return self.cut_off

    async def returned(self, deadline: float, fingerprint: str = "") -> None:
        while self.cut_off and time.monotonic() < deadline:
            await asyncio.sleep(0)

    # As routes

    def up(self, role: str, fingerprint: str = "") -> list[Link]:
        links = [link for link in self.links.values() if link.is_up and link.record.role == role]
        return [link for link in links if fingerprint in ("", link.record.fingerprint)]

    usable = up

    def refresh(self) -> None:
        """The workers' loads do not change."""

    def hashes(
        self,
        token_ids: tuple[int, ...],
        salt: bytes,
        chains: Mapping[str, HashChain],
        fingerprint: str,
    ) -> dict[str, list[bytes]]:
        serving = [fingerprint] if fingerprint else dict.fromkeys(self.fingerprints())
        for one in serving:
            self.hashed.append((token_ids, chains[one]))
        return {one: [] for one in serving}

    def fingerprints(self) -> list[str]:
        return [link.record.fingerprint for link in self.up("decode")]

    async def find(
        self,
        request: RouteRequest,
        hashes: dict[str, list[bytes]],
        avoid: Sequence[frozenset[str]],
        *,
        total_tokens: int,
        **asked: Any,
    ) -> Decision:
        self.asked.append(Asked(request, **asked))
        await asyncio.sleep(0)
        for names in avoid:
            for fingerprint in hashes:
                source, target = (
                    next((n for n in self.names(role, fingerprint) if n not in names), None)
                    for role in ("prefill", "decode")
                )
                if not source or not target:
                    continue
                if request.held_room:
                    return Decision(
                        source, request.held_room, self.uncached, "test", kv_group=fingerprint
                    )
                decode = [n for n in self.names("decode", fingerprint) if n not in names]
                free = next((n for n in decode if not self.rooms_full(n)), None)
                fits = bool(free) and self.has_room
                return Decision(
                    source,
                    free or target,
                    self.uncached,
                    "test",
                    has_room=fits,
                    kv_group=fingerprint,
                )
        raise Unavailable("nobody", retry_after=2.0)

    def names(self, role: str, fingerprint: str) -> list[str]:
        return [link.record.incarnation for link in self.up(role, fingerprint)]

    def rooms_full(self, name: str) -> bool:
        """Whether the decode worker has refused a request that waits."""
        table = self.placement._routing.table
        row = table.row(name)
        return row is not None and bool(table.refusals[row])

    # What a test does

    async def run(
        self,
        *,
        choices: int = 1,
        sampling: SamplingParams = SAMPLING,
        deadline_s: float = 60.0,
        name: str = "r",
        **fields: Any,
    ) -> RunningRequest:
        request = GenerationRequest(
            name, PROMPT, sampling, Principal(), deadline_s, choices=choices, **fields
        )

        def processor() -> OutputProcessor:
            return OutputProcessor(ByteDetokenizer(lambda token: bytes([token]), {}))

        running = RunningRequest(request, processor, time.monotonic() + request.deadline_s)
        await self.placement.place(running, range(choices))
        await self.settle()
        return running

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not condition():
                await asyncio.sleep(0.001)
        # What was placed begins.
        await self.settle()

    def tell(
        self, running: RunningRequest, tokens: int, *, choice: int = 0, ends: bool = False
    ) -> None:
        """This number of further tokens of a choice, by its attempt."""
        state = running.choices[choice]
        output = TokenOutput(
            "r",
            state.attempt,
            len(state.token_ids),
            (65,) * tokens,
            FinishReason.LENGTH if ends else None,
            choice=choice,
        )
        on_output, _ = self.readers["r", state.attempt]
        on_output(output)

    def at(self, running: RunningRequest) -> list[tuple[int, str, str]]:
        return sorted(
            (a.spec.attempt, a.source.record.incarnation, a.target.record.incarnation)
            for a in running.attempts
        )

    def moved(self, reason: str) -> float:
        found = self.metrics.registry.get_sample_value(
            "baton_moved_requests_total", {"reason": reason}
        )
        return found or 0.0

    def close(self, *all_running: RunningRequest) -> None:
        for running in all_running:
            self.placement.release(running)


def record_of(name: str) -> WorkerRecord:
    """Record of a decode worker."""
    return WorkerRecord(
        incarnation=name,
        slot=name,
        role="decode",
        address="",
        metrics_address="",
        model="",
        fingerprint="",
        geometry=Geometry(16, 1, 1, 8, "float32"),
        context_length=1000,
        total_blocks=100,
        max_sequences=4,
    )


GONE = WorkerFailed("it is gone")


async def test_an_answer_goes_on_behind_its_tokens() -> None:
    world = World()
    running = await world.run(priority=4)
    world.tell(running, 3)
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    assert world.at(running) == [(1, "p0", "d1")]
    (attempt,) = running.attempts
    spec = attempt.spec
    assert (spec.token_ids, spec.prompt_length) == ((*PROMPT, 65, 65, 65), 3)
    assert (spec.hand_back, spec.priority, spec.choices) == (True, 4, 1)
    assert world.asked[-1].is_moved
    assert world.aborted == [("d0", 0, None)]
    assert world.moved("decode_failed") == 1
    world.close(running)


def two_models() -> World:
    """A world in which the second worker of each role serves another model than the first."""
    world = World()
    for name in ("p1", "d1"):
        world.links[name].record.fingerprint = "g"
    return world


@pytest.mark.parametrize("cached", [0, 1])
async def test_blocks_that_a_lost_attempt_has_computed_are_billed_as_computed(cached: int) -> None:
    world = World()
    world.uncached = len(PROMPT) - cached
    running = await world.run()
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    (attempt,) = running.attempts
    token = worker_pb2.TokenOutput(request_id="r", attempt=attempt.spec.attempt, token_ids=[65])
    world.placement._on_prefill(
        attempt, prefill_pb2.PrefillResponse(first_token=token, cached_prompt_tokens=2)
    )
    assert (await running.next_delta()).cached_prompt_tokens == cached
    world.close(running)


async def test_an_answer_that_has_begun_never_goes_on_with_another_model() -> None:
    world = two_models()
    running = await world.run()
    world.tell(running, 3)
    world.links["d0"].is_up = False
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    assert (await running.next_delta()).token_ids == (65, 65, 65)
    with pytest.raises(FingerprintGone) as failure:
        await running.next_delta()
    assert failure.value.retry_after
    assert not running.attempts


async def test_an_answer_that_has_not_begun_is_given_by_another_model() -> None:
    world = two_models()
    running = await world.run()
    world.links["d0"].is_up = False
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    assert world.at(running) == [(1, "p1", "d1")]
    world.tell(running, 1)
    assert (await running.next_delta()).fingerprint == "g"
    world.close(running)


@pytest.mark.parametrize("way", ["worker_drains", "worker_silent", "worker_stalled"])
async def test_a_worker_without_another_of_its_model_keeps_what_has_begun(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = two_models()
    begun, fresh = await world.run(), await world.run(name="s")
    world.tell(begun, 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            getattr(world.failover, way)(world.links["d0"])
            await world.settle()
    assert world.at(begun) == [(0, "p0", "d0")]
    # A drain moves what has begun alone.
    moves = way != "worker_drains"
    assert world.at(fresh) == ([(1, "p1", "d1")] if moves else [(0, "p0", "d0")])
    said = [record for record in caplog.records if "no other worker can go on" in record.message]
    assert len(said) == (0 if moves else 1)
    world.close(begun, fresh)


async def test_parts_of_one_call_are_placed_at_one_model() -> None:
    world = two_models()
    binding = ModelBinding()
    first = await world.run(binding=binding)
    world.links["d0"].is_up = False
    with pytest.raises(Unavailable):
        await world.run(binding=binding)
    world.links["d0"].is_up = True
    second = await world.run(binding=binding, name="s")
    assert {attempt.fingerprint for one in (first, second) for attempt in one.attempts} == {"f"}
    world.close(first, second)
    assert binding.required() == "", "neither has begun"


async def test_choices_that_have_tokens_move_one_by_one() -> None:
    world = World()
    running = await world.run(choices=3, background=True)
    world.tell(running, 2, choice=0, ends=True)
    world.tell(running, 1, choice=2)
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    specs = {a.spec.choice: a.spec for a in running.attempts}
    assert sorted(specs) == [1, 2]
    assert specs[1].token_ids == PROMPT
    assert specs[2].token_ids == (*PROMPT, 65)
    assert {spec.attempt for spec in specs.values()} == {1, 2}
    assert all(spec.choices == 1 for spec in specs.values())
    assert specs[1].priority == LOWEST_PRIORITY
    world.close(running)


async def test_choices_without_tokens_move_together() -> None:
    world = World()
    running = await world.run(choices=3)
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    (attempt,) = running.attempts
    assert (attempt.spec.choice, attempt.spec.choices, attempt.spec.attempt) == (0, 3, 1)
    world.close(running)


async def test_late_messages_of_an_old_attempt_are_dropped() -> None:
    world = World()
    running = await world.run()
    world.tell(running, 1)
    world.failover.worker_broken("d0", GONE)
    late = TokenOutput("r", 0, 1, (66,))
    assert ("r", 0) not in world.readers
    await world.settle()
    running.accept(late)
    assert running.choices[0].token_ids == [65]
    world.close(running)


async def test_a_broken_prefill_stream_excludes_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 0.0)
    world = World()
    running = await world.run()
    stream = world.links["p0"].prefills
    stream.breaks += 1
    stream.fail(GONE)
    await world.until(lambda: world.at(running) == [(1, "p1", "d0")])
    assert world.links["p0"].failed_at is not None
    assert world.moved("prefill_failed") == 1
    world.close(running)


async def test_a_failed_handoff_tries_two_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either may be at fault; where one of them is known to be down, the other is not."""
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 0.0)
    world = World()
    running = await world.run()
    world.links["p0"].prefills.fail(HandoffError("a wire"))
    await world.until(lambda: world.at(running) == [(1, "p1", "d1")])
    world.links["d1"].is_up = False
    world.links["p1"].prefills.fail(HandoffError("a wire"))
    await world.until(lambda: world.at(running) == [(2, "p0", "d0")])
    world.links["p1"].is_up = False
    for attempt in range(3, MAX_FAILURES + 1):
        world.links["p0"].prefills.fail(HandoffError("a wire"))
        # No other worker is there, and both are up.
        here = [(attempt, "p0", "d0")]
        await world.until(lambda here=here: world.at(running) == here)  # type: ignore[misc]
    world.links["p0"].prefills.fail(HandoffError("a wire"))
    with pytest.raises(HandoffError):
        await running.next_delta()
    assert world.moved("handoff_failed") == MAX_FAILURES


async def test_a_handoff_that_fails_for_want_of_a_worker_has_no_last_resort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 0.0)
    world = World()
    running = await world.run()
    for name in ("p1", "d0", "d1"):
        world.links[name].is_up = False
    world.links["p0"].prefills.fail(HandoffError("a wire"))
    with pytest.raises(HandoffError):
        await running.next_delta()
    assert world.moved("handoff_failed") == 0


async def test_a_committed_prefill_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 5.0)
    world = World()
    running = await world.run()
    world.links["p0"].prefills.fail(GONE)
    await world.settle()
    world.tell(running, 1)
    await asyncio.sleep(0.01)
    assert world.at(running) == [(0, "p0", "d0")]
    world.close(running)


async def test_errors_that_no_worker_caused_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    running = await world.run()
    world.links["p0"].prefills.fail(GrammarFailed("too deep"))
    with pytest.raises(GrammarFailed):
        await running.next_delta()
    world.close(running)


async def test_an_output_that_is_lost_ends_its_request() -> None:
    world = World()
    running = await world.run()
    _, on_lost = world.readers["r", 0]
    on_lost(MemoryError())
    with pytest.raises(BatonError, match="MemoryError"):
        await running.next_delta()
    world.close(running)


async def test_outputs_reach_what_decides() -> None:
    """An error and a hand-back, as the decode worker sends them."""
    world = World()
    running = await world.run()
    on_output, _ = world.readers["r", 0]
    on_output(TokenOutput("r", 0, 0, (), handed_back=True))
    await world.settle()
    assert world.at(running) == [(1, "p0", "d0")]
    assert world.moved("preempted") == 1
    on_output, _ = world.readers["r", 1]
    on_output(TokenOutput("r", 1, 0, (), error="it failed", error_code="worker_failed"))
    await world.settle()
    assert world.at(running) == [(2, "p0", "d1")]
    assert world.aborted == [], "nothing is left at either worker"
    world.close(running)


async def test_nothing_is_decided_after_the_end() -> None:
    world = World()
    running = await world.run()
    world.failover.close()
    on_output, _ = world.readers["r", 0]
    on_output(TokenOutput("r", 0, 0, (), error="it failed", error_code="worker_failed"))
    await world.settle()
    assert world.at(running) == [(0, "p0", "d0")]
    assert world.listeners == []
    world.close(running)


async def test_a_deadline_at_a_decode_worker_is_reported() -> None:
    world = World()
    running = await world.run()
    (attempt,) = running.attempts
    world.failover.decode_failed(attempt, DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded):
        await running.next_delta()
    world.close(running)
    assert world.aborted == [], "it has ended there"


async def test_without_other_workers_the_failure_has_a_retry_after() -> None:
    world = World()
    world.links["d1"].is_up = False
    running = await world.run()
    world.links["d0"].is_up = False
    world.failover.worker_broken("d0", GONE)
    with pytest.raises(WorkerFailed) as caught:
        await running.next_delta()
    assert caught.value.retry_after
    assert not running.attempts


async def test_a_worker_whose_stream_broke_is_better_than_none() -> None:
    """Its stream is there again, and the only other worker has broken meanwhile."""
    world = World()
    running = await world.run()
    world.links["d1"].is_up = False
    world.failover.worker_broken("d0", GONE)
    await world.until(lambda: world.at(running) == [(1, "p0", "d0")])
    world.close(running)


async def lost_twice(world: World, what_becomes: Callable[[str], object]) -> RunningRequest:
    """Both decode workers are lost under a request, at about the same place."""
    running = await world.run()
    world.tell(running, 20)
    world.links["d2"] = Link("d2", "decode")
    for name in ("d0", "d1"):
        world.links[name].connected = False
        world.failover.worker_broken(name, GONE)
        await world.settle()
        what_becomes(name)
        if name == "d0":
            world.tell(running, 1)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*running.moves)
    return running


async def test_two_deaths_at_one_place_are_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover_module, "LOOK_S", 0.001)
    world = World()
    running = await lost_twice(world, world.links.pop)
    await running.next_delta()
    with pytest.raises(PoisonRequest):
        await running.next_delta()
    assert world.quarantine
    world.close(running)


@pytest.mark.parametrize("speak_again", [True, False])
async def test_lost_streams_are_no_deaths(
    speak_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router stood still: the workers are there, or it is not known in time."""
    monkeypatch.setattr(failover_module, "LOOK_S", 0.001)
    world = World(advanced=AdvancedConfig(registry_ttl_s=0.016, heartbeat_s=0.002))

    def what_becomes(name: str) -> None:
        world.links[name].connected = speak_again

    running = await lost_twice(world, what_becomes)
    assert running.attempts, "it goes on"
    assert not world.quarantine
    world.close(running)


async def failed_steps(world: World, error: type[WorkerFailed]) -> RunningRequest:
    """Two decode workers say that they have failed, and live on."""
    running = await world.run()
    world.tell(running, 2)
    for _ in range(2):
        (attempt,) = running.attempts
        world.failover.decode_failed(attempt, error("it failed"))
        await world.settle()
    return running


async def test_failed_steps_on_two_workers_are_poison() -> None:
    world = World()
    running = await failed_steps(world, StepFailed)
    await running.next_delta()
    with pytest.raises(PoisonRequest):
        await running.next_delta()
    assert world.quarantine
    world.close(running)


@pytest.mark.parametrize("error", [StepFailed, WorkerFailed])
async def test_a_step_that_fails_for_one_request_is_doubtful_evidence_against_its_worker(
    monkeypatch: pytest.MonkeyPatch, error: type[WorkerFailed]
) -> None:
    """Else some bad texts would make routers leave a healthy worker out."""
    doubts: list[bool] = []

    def broke(_: object, now: float, streams: int = 1, *, doubtful: bool = False) -> None:
        doubts.append(doubtful)

    monkeypatch.setattr(Breaker, "broke", broke)
    world = World()
    running = await failed_steps(world, error)
    assert doubts == [error is StepFailed] * 2
    world.close(running)


async def test_workers_that_end_a_request_for_another_reason_are_no_evidence() -> None:
    """They stop, or lack the tokens of an earlier step."""
    world = World()
    running = await failed_steps(world, WorkerFailed)
    assert running.attempts
    assert not world.quarantine
    world.close(running)


async def test_failed_steps_on_two_prefill_workers_are_poison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 0.0)
    world = World()
    running = await world.run()
    for name in ("p0", "p1"):
        stream = world.links[name].prefills
        stream.messages += 1
        stream.fail(StepFailed("it failed"))
        await asyncio.sleep(0.01)
    with pytest.raises(PoisonRequest):
        await running.next_delta()
    world.close(running)


async def test_a_failed_step_is_a_failed_worker_to_clients() -> None:
    world = World()
    world.links["d1"].is_up = False
    running = await world.run()
    (attempt,) = running.attempts
    world.failover.decode_failed(attempt, StepFailed("it failed"))
    with pytest.raises(WorkerFailed, match="it failed") as caught:
        await running.next_delta()
    assert caught.value.code == WorkerFailed.code
    assert caught.value.retry_after
    world.close(running)


async def test_a_request_that_waited_elsewhere_has_killed_no_worker() -> None:
    """It was to be handed over to workers that died: none of them has seen it."""
    world = World()
    running = await world.run()
    for name in ("d0", "d1", "d0", "d1"):
        world.failover.worker_broken(name, GONE)
        await world.settle()
        assert running.attempts
    assert not world.quarantine
    world.close(running)


@pytest.mark.parametrize("have_begun", [True, False])
async def test_prefill_workers_that_died_before_they_had_a_prompt_died_of_something_else(
    have_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool dies at once: what was placed at its dead workers meanwhile is no poison."""
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 0.0)
    monkeypatch.setattr(failover_module, "LOOK_S", 0.001)
    world = World()
    running = await world.run()
    for name, then in (("p0", ["p1"]), ("p1", [])):
        stream = world.links[name].prefills
        stream.messages += have_begun
        stream.breaks += 1
        world.links[name].connected = world.links[name].is_up = False
        stream.fail(GONE)
        await world.until(lambda: [at for _, at, _ in world.at(running)] == then)  # noqa: B023
        del world.links[name]
    with pytest.raises(PoisonRequest if have_begun else WorkerFailed):
        await running.next_delta()
    assert bool(world.quarantine) == have_begun
    world.close(running)


async def test_moves_are_bounded_for_each_request_and_for_all() -> None:
    world = World(max_moves=3)
    running = await world.run()
    for n in range(4):
        world.failover.worker_broken(f"d{n % 2}", GONE)
        await world.settle()
    with pytest.raises(WorkerFailed) as caught:
        await running.next_delta()
    assert caught.value.retry_after
    world = World()
    running = await world.run()
    for n in range(MAX_FAILURES + 1):
        world.failover.worker_broken(f"d{n % 2}", GONE)
        await world.settle()
    with pytest.raises(WorkerFailed):
        await running.next_delta()


async def test_what_is_handed_back_goes_on_without_any_budget() -> None:
    world = World(max_moves=1)
    running = await world.run(choices=2)
    world.tell(running, 2, choice=0)
    world.tell(running, 3, choice=1)
    for times in range(1, 4):
        attempt = next(a for a in running.attempts if 1 in a.choices)
        world.failover.handed_back(attempt, 1)
        await world.settle()
        assert world.moved("preempted") == times
    specs = {a.spec.choice: a.spec for a in running.attempts}
    assert specs[0].attempt == 0
    assert (specs[1].attempt, specs[1].preemptions) == (3, 3)
    assert specs[1].token_ids == (*PROMPT, 65, 65, 65)
    assert world.aborted == []
    world.close(running)


async def test_a_worker_that_has_done_all_may_go() -> None:
    """While another choice is on its way elsewhere."""
    world = World()
    running = await world.run(choices=2)
    world.tell(running, 2, choice=0, ends=True)
    world.tell(running, 1, choice=1)
    (attempt,) = running.attempts
    world.failover.handed_back(attempt, 1)
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    assert [a.spec.choice for a in running.attempts] == [1]
    delta = await running.next_delta()
    assert (delta.choice, delta.token_ids) == (0, (65, 65))
    world.close(running)


async def test_a_silent_worker_keeps_what_no_other_can_take() -> None:
    world = World()
    world.links["d1"].is_up = False
    running = await world.run()
    world.tell(running, 1)
    world.failover.worker_silent(cast(Any, world.links["d0"]))
    await world.settle()
    assert world.at(running) == [(0, "p0", "d0")]
    assert not running.moves
    world.close(running)


def short_contexts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker left could take what the request has become."""

    async def find(*_: Any, **__: Any) -> Decision:
        await asyncio.sleep(0)
        raise ContextLengthExceeded("too long for all that are left")

    monkeypatch.setattr(world, "find", find)


@pytest.mark.parametrize("way", ["worker_silent", "worker_stalled", "worker_drains"])
async def test_what_is_too_long_for_the_others_ends_where_it_is(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    world = World()
    running = await world.run()
    world.tell(running, 5)
    short_contexts(world, monkeypatch)
    getattr(world.failover, way)(world.links["d0"])
    await world.settle()
    assert world.at(running) == [(0, "p0", "d0")]
    assert not running.moves
    world.tell(running, 1, ends=True)
    assert (await running.next_delta()).finish_reason is FinishReason.LENGTH
    world.close(running)


async def test_what_is_too_long_for_the_others_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not the client's fault."""
    world = World()
    running = await world.run()
    short_contexts(world, monkeypatch)
    world.failover.worker_broken("d0", GONE)
    with pytest.raises(WorkerFailed) as caught:
        await running.next_delta()
    assert caught.value.retry_after


async def test_a_silent_worker_keeps_what_no_budget_is_left_for() -> None:
    world = World(max_moves=1)
    assert world.budget.take(0.0)
    running = await world.run()
    world.tell(running, 1)
    world.failover.worker_silent(cast(Any, world.links["d0"]))
    await world.settle()
    assert world.at(running) == [(0, "p0", "d0")]
    world.close(running)


async def test_a_silent_worker_that_speaks_again_keeps_all() -> None:
    world = World()
    running = await world.run()
    world.tell(running, 1)
    silent = world.links["d0"]
    world.failover.worker_silent(cast(Any, silent))
    silent.suspected = False
    await world.settle()
    assert world.at(running) == [(0, "p0", "d0")]
    world.failover.worker_silent(cast(Any, silent))
    await world.settle()
    assert world.at(running) == [(1, "p0", "d1")]
    assert world.moved("decode_silent") == 1
    assert ("d0", 0, None) in world.aborted
    world.close(running)


async def test_prompts_of_a_silent_prefill_worker_move() -> None:
    world = World()
    running = await world.run()
    world.failover.worker_silent(cast(Any, world.links["p0"]))
    await world.settle()
    assert world.at(running) == [(1, "p1", "d0")]
    assert world.moved("prefill_silent") == 1
    world.close(running)


async def test_what_a_worker_has_whose_engine_stands_still_moves() -> None:
    world = World()
    running = await world.run()
    world.tell(running, 1)
    world.failover.worker_stalled(cast(Any, world.links["d0"]))
    await world.settle()
    assert world.at(running) == [(1, "p0", "d1")]
    assert world.moved("decode_stalled") == 1
    world.close(running)
    world = World()
    running = await world.run()
    world.failover.worker_stalled(cast(Any, world.links["p0"]))
    await world.settle()
    assert world.at(running) == [(1, "p1", "d0")]
    assert world.moved("prefill_stalled") == 1
    world.close(running)


async def test_a_worker_is_expected_to_speak_from_when_a_prompt_is_handed_to_it() -> None:
    world = World()
    running = await world.run()
    (attempt,) = running.attempts
    attempt.promise.computed(time.monotonic())
    assert world.detector.expected_messages() == {"p0": 0, "d0": 0}
    world.close(running)


async def test_an_engine_is_expected_to_step_while_it_has_something_to_compute() -> None:
    world = World()
    running = await world.run()
    source = world.links["p0"]
    assert world.detector.expected_steps() == {}, "it waits for blocks, say"
    source.engine_load = LoadSnapshot("p0", engine_steps=7, steps_in_flight=1)
    assert world.detector.expected_steps() == {"p0": 7}
    world.tell(running, 1)
    assert world.detector.expected_steps() == {}
    world.links["d0"].engine_load = LoadSnapshot("d0", engine_steps=2, steps_in_flight=2)
    assert world.detector.expected_steps() == {"d0": 2}
    world.close(running)


async def test_a_worker_whose_streams_break_again_and_again_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them after it had begun well."""
    monkeypatch.setattr(breaker_module, "MOMENT_S", 0.001)
    world = World(quarantine_s=0.0)
    for n in range(3):
        running = await world.run()
        world.tell(running, 1 + 9 * n)
        assert world.links["d0"].breaker.openings == 0
        world.failover.worker_broken("d0", GONE)
        await world.settle()
        world.tell(running, 1, ends=True)
        world.close(running)
        await asyncio.sleep(0.002)
    assert world.links["d0"].breaker.openings == 1
    assert world.links["d1"].breaker.openings == 0


async def test_a_router_that_was_cut_off_leaves_no_worker_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often the streams of all workers break together."""
    monkeypatch.setattr(breaker_module, "MOMENT_S", 0.001)
    world = World()
    for _ in range(4):
        running = await world.run()
        world.tell(running, 1)
        world.cut_off = True
        world.failover.worker_broken("d0", GONE)
        world.cut_off = False
        await world.settle()
        world.close(running)
        await asyncio.sleep(0.002)
    assert world.links["d0"].breaker.openings == 0


async def test_a_request_that_fails_again_avoids_every_worker_that_has_failed_it() -> None:
    world = World()
    world.links["d2"] = Link("d2", "decode")
    running = await world.run()
    for worker, then in (("d0", "d1"), ("d1", "d2")):
        world.tell(running, 2 * PROGRESS_TOKENS)
        world.failover.worker_broken(worker, GONE)
        await world.settle()
        ((_, _, target),) = world.at(running)
        assert target == then
    world.close(running)


async def test_streams_that_were_only_to_come_to_a_worker_do_not_break_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breaker_module, "MOMENT_S", 0.001)
    world = World()
    running = await world.run()
    for _ in range(3):
        world.failover.worker_broken("d0", GONE)
        await world.settle()
        await asyncio.sleep(0.002)
    assert world.links["d0"].breaker.openings == 0
    world.close(running)


async def test_errors_that_no_worker_caused_open_no_breaker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 0.0)
    monkeypatch.setattr(breaker_module, "MOMENT_S", 0.001)
    world = World()
    for _ in range(4):
        running = await world.run()
        world.links["p0"].prefills.fail(Unavailable("it is drained"))
        await asyncio.sleep(0.002)
        world.close(running)
    assert all(link.breaker.openings == 0 for link in world.links.values())


async def test_an_error_of_the_router_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker_module, "MOMENT_S", 0.001)
    world = World()
    for _ in range(4):
        running = await world.run()
        for name in ("d0", "d1"):
            world.tell(running, 1)
            world.failover.worker_broken(name, BatonError("internal error: ValueError"))
            await world.settle()
            assert running.attempts, "it goes on"
        world.close(running)
        await asyncio.sleep(0.002)
    assert all(link.breaker.openings == 0 for link in world.links.values())
    assert not world.quarantine


async def test_workers_are_expected_to_speak_while_they_have_something_to_do() -> None:
    world = World()
    running = await world.run()
    assert world.detector.expected_messages() == {"p0": 0}
    world.tell(running, 1)
    assert world.detector.expected_messages() == {"d0": 0}
    world.close(running)
    assert world.detector.expected_messages() == {}


async def test_requests_wait_for_workers_that_were_cut_off_together() -> None:
    """No worker is blamed, whatever a request had when each of its workers went away."""
    world = World(max_moves=1)
    running = await world.run()
    for name in ("d0", "d1", "d0"):
        world.tell(running, 1)
        world.cut_off = True
        for link in world.links.values():
            link.is_up = False
        world.failover.worker_broken(name, GONE)
        await world.settle()
        assert running.attempts == set()
        world.cut_off = False
        for link in world.links.values():
            link.is_up = True
        await world.settle()
        assert len(running.attempts) == 1
    assert world.at(running) == [(3, "p0", "d1")]
    assert all(link.breaker.openings == 0 for link in world.links.values())
    assert not running.excluded
    assert not world.quarantine
    world.close(running)


async def test_the_only_worker_is_good_enough_once_it_is_back() -> None:
    world = World()
    del world.links["d1"]
    running = await world.run()
    world.tell(running, 2)
    world.cut_off = True
    world.failover.worker_broken("d0", GONE)
    world.cut_off = False
    await world.settle()
    assert world.at(running) == [(1, "p0", "d0")]
    world.close(running)


async def test_workers_that_go_away_again_and_again_end_a_request() -> None:
    world = World()
    del world.links["d1"]
    running = await world.run()
    for _ in range(MAX_FAILURES + 1):
        world.cut_off = True
        world.failover.worker_broken("d0", GONE)
        world.cut_off = False
        await world.settle()
    assert not running.attempts
    with pytest.raises(WorkerFailed):
        await running.next_delta()


async def test_waiting_for_workers_ends_with_the_deadline() -> None:
    world = World()
    running = await world.run(deadline_s=0.05)
    world.cut_off = True
    world.failover.worker_broken("d0", GONE)
    with pytest.raises(DeadlineExceeded):
        await running.next_delta()


async def test_a_prefill_stream_that_broke_with_all_others_blames_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failover_module, "COMMIT_GRACE_S", 0.0)
    world = World()
    del world.links["p1"]
    running = await world.run()
    world.cut_off = True
    stream = world.links["p0"].prefills
    stream.breaks += 1
    stream.fail(GONE)
    await world.until(lambda: bool(running.moves))
    world.cut_off = False
    await world.until(lambda: world.at(running) == [(1, "p0", "d0")])
    assert world.links["p0"].failed_at is None
    world.close(running)


@pytest.mark.parametrize("how", ["scored", "embeds"])
async def test_a_prompts_part_that_is_lost_is_computed_again(how: str) -> None:
    """The last token has overtaken it."""
    world = World()
    scores = 0 if how == "scored" else None
    running = await world.run(
        sampling=SamplingParams(max_tokens=50, prompt_logprobs=scores), embeds=how == "embeds"
    )
    world.tell(running, 2, ends=True)
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    assert world.at(running) == [(1, "p0", "d1")]
    (attempt,) = running.attempts
    assert attempt.spec.token_ids == PROMPT
    assert attempt.is_scored
    world.tell(running, 2)
    part = {"prompt_logprobs": (TokenLogprobs(-1.0),)} if scores == 0 else {"embedding": (0.5,)}
    running.accept(TokenOutput("r", 1, 2, (65,), FinishReason.LENGTH, **part))
    delta = await running.next_delta()
    assert delta.prompt_logprobs or delta.embedding
    assert running.finished
    assert len(delta.token_ids) == (3 if how == "scored" else 0)
    world.close(running)


@pytest.mark.parametrize("way", ["worker_silent", "worker_stalled", "worker_drains"])
async def test_a_worker_without_another_costs_nothing_for_each_request(way: str) -> None:
    """It is asked about again and again."""
    world = World()
    world.links["d1"].is_up = False
    running = await world.run()
    world.tell(running, 5)
    asked = len(world.asked)
    for _ in range(3):
        getattr(world.failover, way)(world.links["d0"])
        await world.settle()
    assert len(world.asked) == asked
    assert world.at(running) == [(0, "p0", "d0")]
    world.links["d1"].is_up = True
    getattr(world.failover, way)(world.links["d0"])
    await world.settle()
    assert len(world.asked) == asked + 1
    world.close(running)


@pytest.mark.parametrize("local", ["never", "auto"])
async def test_prompts_of_the_only_prefill_worker_can_go_to_decode_workers(local: str) -> None:
    world = World(local_prefill=local)
    world.links["p1"].is_up = False
    running = await world.run()
    asked = len(world.asked)
    world.failover.worker_silent(cast(Any, world.links["p0"]))
    await world.settle()
    assert len(world.asked) == asked + (local == "auto")
    world.close(running)


async def test_a_sequence_is_hashed_once_however_often_it_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    running = await world.run()
    _, chain = world.hashed[-1]
    before = chain.of(PROMPT, 1, b"key")
    world.tell(running, 2)
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    token_ids, again = world.hashed[-1]
    assert again is chain
    hashed: list[int] = []

    def block_hashes(tokens: Any, size: int, key: bytes, known: list[bytes]) -> list[bytes]:
        hashed.append(len(tokens) - len(known))
        return real(tokens, size, key, known)

    real = hashing.block_hashes
    monkeypatch.setattr(hashing, "block_hashes", block_hashes)
    after = chain.of(token_ids, 1, b"key")
    assert hashed == [2]
    assert after == real(token_ids, 1, b"key")
    assert after[:3] == before
    assert chain.of(PROMPT, 1, b"another") == real(PROMPT, 1, b"another")
    world.close(running)


# Room


def no_room(steps: int = 0, running: int = 0) -> NoRoom:
    full = NoRoom("full")
    full.load = LoadSnapshot(engine_steps=steps, running=running)
    return full


async def test_a_refused_request_goes_to_another_worker_and_no_worker_is_blamed() -> None:
    world = World(max_moves=0)
    running = await world.run()
    world.links["p0"].prefills.fail(no_room(5, running=4))
    await world.settle()
    assert world.at(running) == [(1, "p0", "d1")]
    assert world.aborted == [], "the request keeps its turn at the full worker"
    assert world.links["d0"].load.running == 4
    assert not world.waits
    assert (running.failures, running.has_migrated) == (0, False)
    assert running.excluded == set()
    assert [one.number for one in running.request.timeline.attempts] == [1]
    assert sum(world.moved(reason) for reason in ("decode_failed", "handoff_failed")) == 0
    # The worker that has room takes it: the turn at the other one is given up.
    world.tell(running, 1)
    await world.settle()
    assert world.aborted == [("d0", 0, None)]
    world.close(running)


async def test_a_request_that_no_worker_has_room_for_waits_and_takes_granted_room() -> None:
    world = World()
    running = await world.run()
    for _ in range(2):
        world.links["p0"].prefills.fail(no_room())
        await world.settle()
    assert world.waits == [("r", False)]
    assert running.attempts == set()
    world.on_granted("d1", ("r", 1))
    await world.settle()
    assert world.at(running) == [(2, "p0", "d1")]
    assert world.asked[-1].request.held_room == "d1"
    world.tell(running, 1)
    await world.settle()
    assert world.aborted == [("d0", 0, None)]
    world.close(running)


async def test_granted_room_that_no_request_needs_is_given_up() -> None:
    world = World()
    running = await world.run()
    world.links["p0"].prefills.fail(no_room())
    await world.settle()
    world.on_granted("d0", ("r", 0))
    await world.settle()
    assert world.aborted == [("d0", 0, None)]
    world.tell(running, 1)
    await world.settle()
    assert world.aborted == [("d0", 0, None)]
    world.close(running)


async def test_a_grant_that_overtakes_its_refusal_is_used() -> None:
    """They come by different streams."""
    world = World()
    running = await world.run()
    world.on_granted("d0", ("r", 0))
    world.links["p0"].prefills.fail(no_room())
    await world.settle()
    assert world.at(running) == [(1, "p0", "d0")]
    assert not world.rooms_full("d0")
    world.close(running)


async def test_a_request_that_ends_gives_its_turns_up() -> None:
    world = World()
    running = await world.run()
    for _ in range(2):
        world.links["p0"].prefills.fail(no_room())
        await world.settle()
    world.close(running)
    await world.settle()
    assert sorted(world.aborted) == [("d0", 0, None), ("d1", 1, None)]
    assert not world.rooms_full("d0")


async def test_a_migrating_request_without_room_waits_as_one_and_is_not_rejected() -> None:
    world = World()
    running = await world.run()
    world.tell(running, 2)
    world.failover.worker_broken("d0", GONE)
    await world.settle()
    world.links["d0"].is_up = False
    world.links["p0"].prefills.fail(no_room())
    await world.settle()
    assert world.waits == [("r", True)]
    world.close(running)


async def test_a_drained_worker_keeps_its_requests_while_no_other_has_room() -> None:
    world = World()
    running = await world.run()
    world.tell(running, 1)
    world.has_room = False
    world.failover.worker_drains(cast(WorkerLink, world.links["d0"]))
    await world.settle()
    assert world.at(running) == [(0, "p0", "d0")]
    assert not world.waits
    world.close(running)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_search_that_ends_after_its_attempt_starts_no_other(*, drains: bool) -> None:
    world = World()
    running = await world.run()
    world.tell(running, 1)
    if drains:
        world.failover.worker_drains(cast(WorkerLink, world.links["d0"]))
    else:
        world.failover.worker_silent(cast(WorkerLink, world.links["d0"]))
    await asyncio.sleep(0)
    assert world.asked[-1].is_moved, "the search has begun"
    world.tell(running, 1, ends=True)
    await world.settle()
    assert [attempt for attempt, _, _ in world.at(running)] in ([], [0])
    assert running.next_attempt == 1
    world.close(running)


async def test_work_of_a_migration_that_is_cancelled_before_it_begins_is_closed() -> None:
    world = World()
    running = await world.run()
    ran = []

    async def work() -> None:
        ran.append(True)

    moved = work()
    running.move(moved)
    world.placement.release(running)
    await world.settle()
    assert inspect.getcoroutinestate(moved) == inspect.CORO_CLOSED
    assert not ran
