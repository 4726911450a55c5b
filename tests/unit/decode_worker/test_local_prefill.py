"""Prompts on a decode worker: with a real engine core, on the test's clock, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffError,
    InvalidRequest,
    NoRoom,
    TicketEnded,
    WorkerFailed,
)
from baton.request import FinishReason, SequenceSpec, TokenOutput
from baton.rpc import convert
from baton.v1 import prefill_pb2
from decode_worker import local_prefill
from decode_worker import requests as requests_module
from decode_worker import role as role_module
from decode_worker.receiver import Offer
from decode_worker.role import DecodeRole
from kvtransfer.transports.transport import Peer
from tests.support.engine.fake_engine import VOCAB, answer, kv_of
from tests.support.worker.manual_worker import (
    BLOCK_BYTES,
    GEOMETRY,
    INCARNATION,
    ROUTER,
    SIZE,
    ManualWorker,
    settle,
    spec_of,
)
from worker.prefill import flow
from worker.prefill.fetch_estimates import FetchEstimates

HOLDER = prefill_pb2.PrefixSource(address="127.0.0.1:1", incarnation="prefill-0:1", blocks=99)


class Eager(FetchEstimates):
    """The named worker is asked."""

    def pays(
        self, incarnation: str, transport: str, size: int, compute_s: float, now: float
    ) -> bool:
        return True


class World(ManualWorker):
    """A decode worker, and a holder whose answer the test waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_sequences: int = 8) -> None:
        super().__init__(monkeypatch, max_sequences=max_sequences)
        for module in (requests_module, role_module, local_prefill, flow):
            monkeypatch.setattr(module, "time", self.clock)
        self.asked = asyncio.Event()
        self.holder_answers = asyncio.Event()
        self.held: tuple[int, ...] = ()
        """Tokens whose full blocks the holder has; none of them is cached here."""
        self.role = DecodeRole(self.context, Eager())
        self.core.subscribe(self.role)
        self.core.start()
        self.role.sequences.outbox(ROUTER).open()

    async def pull(
        self, holder: Peer, ticket_id: str, hashes: Sequence[bytes], deadline_s: float
    ) -> int:
        self.asked.set()
        await self.holder_answers.wait()
        count = min(len(self.held) // SIZE, len(hashes))
        if count:
            blocks = self.receiver.begin_copy(
                ticket_id, holder.incarnation, "shm", range(count), 0, BLOCK_BYTES, self.now
            )
            assert blocks is not None
            self.model.write(list(blocks), 0, kv_of(list(self.held[: count * SIZE])))
            self.receiver.end_copy(ticket_id, "shm", count * BLOCK_BYTES)
        return count

    async def run(
        self,
        spec: SequenceSpec,
        send: Callable[[prefill_pb2.PrefillResponse], None],
        source: prefill_pb2.PrefixSource | None = None,
        incarnation: str = INCARNATION,
    ) -> None:
        await self.role.flow.run(
            prefill_pb2.PrefillRequest(
                sequence=convert.sequence_to_proto(spec),
                decode_incarnation=incarnation,
                source=source,
            ),
            send,
        )

    async def call(
        self, spec: SequenceSpec, source: prefill_pb2.PrefixSource | None = None
    ) -> asyncio.Task[list[prefill_pb2.PrefillResponse]]:
        """A call that has got as far as it can without a step."""

        async def responses() -> list[prefill_pb2.PrefillResponse]:
            found: list[prefill_pb2.PrefillResponse] = []
            await self.run(spec, found.append, source)
            return found

        task = asyncio.create_task(responses())
        await settle()
        return task

    async def refusal(self, spec: SequenceSpec) -> BatonError:
        with pytest.raises(BatonError) as raised:
            await (await self.call(spec))
        return raised.value

    def reserve(self, spec: SequenceSpec) -> None:
        self.role.reserve(Offer("model", GEOMETRY, INCARNATION, "writer", spec))

    def told(self) -> list[TokenOutput]:
        return self.role.sequences.outbox(ROUTER).take().outputs


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_the_first_token_is_answered_and_the_sequence_goes_on(world: World) -> None:
    spec = spec_of(length=22, max_tokens=3)
    call = await world.call(spec)
    await world.step(0.2)
    assert not call.done(), "a token before the last chunk"
    await world.step(0.1)
    (response,) = await call
    expected, _ = answer(spec, (), 64)
    first = convert.output_from_proto(response.first_token)
    assert first == TokenOutput("r", 0, 0, (expected[22],))
    assert response.computed_tokens == 22
    assert response.compute_ms == pytest.approx(300)
    assert response.queue_ms == 0
    assert response.cached_prompt_tokens == 0
    await world.drain()
    told = [(o.index, o.token_ids, o.finish_reason) for o in world.told()]
    assert told == [
        (0, (expected[22],), None),
        (1, (expected[23],), None),
        (2, (expected[24],), FinishReason.LENGTH),
    ]
    world.check_nothing_is_held()


async def test_an_end_that_comes_before_the_call_is_answered_is_not_the_first_tokens(
    world: World,
) -> None:
    """Two steps end one right after the other; the second ends the answer."""
    spec = spec_of(length=6, max_tokens=2)
    call = await world.call(spec)
    for _ in range(2):
        world.thread.end(world.model.run(world.plan()))
        await asyncio.sleep(0)
    (response,) = await call
    expected, _ = answer(spec, (), 64)
    first = convert.output_from_proto(response.first_token)
    assert first == TokenOutput("r", 0, 0, (expected[6],))
    finishes = [output.finish_reason for output in world.told()]
    assert finishes == [None, FinishReason.LENGTH]


async def test_a_prefix_that_is_held_here_is_not_computed(world: World) -> None:
    for request in ("one", "two"):
        call = await world.call(spec_of(request, length=12, max_tokens=1))
        await world.drain()
        (response,) = await call
        expected = 8 if request == "two" else 0
        # The last block's last token must be computed in any case, and so its block.
        assert response.cached_prompt_tokens == expected
        assert response.computed_tokens == 12 - expected
        assert response.first_token.finish_reason
    world.check_nothing_is_held()


async def test_the_router_of_a_refused_prompt_gets_a_grant_when_there_is_room(world: World) -> None:
    world.role.sequences.outbox(ROUTER).open()
    world.reserve(spec_of("promised", length=60, first=1))
    world.reserve(spec_of("another", length=60, first=5))
    refused = await world.refusal(spec_of("local", length=20, first=3))
    assert isinstance(refused, NoRoom)
    world.role.abort(("promised", 0))
    await settle()
    assert world.role.sequences.outbox(ROUTER).take().granted == [("local", 0)]
    await world.call(replace(spec_of("local", length=20, first=3), attempt=1))
    for name, attempt in (("local", 1), ("another", 0)):
        world.role.abort((name, attempt))
    await world.drain()
    world.check_nothing_is_held()


async def test_a_refused_prompt_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_sequences=1)
    first = await world.call(spec_of("first", max_tokens=9))
    spec = spec_of("second", first=3)
    message = prefill_pb2.PrefillRequest(
        sequence=convert.sequence_to_proto(spec), decode_incarnation=INCARNATION
    )
    read = Mock(side_effect=AssertionError("the prompt is read"))
    monkeypatch.setattr(convert, "sequence_from_proto", read)
    with pytest.raises(NoRoom):
        await world.role.flow.run(message, unexpected)
    monkeypatch.undo()
    first.cancel()
    await settle()
    await world.drain()
    world.check_nothing_is_held()


async def test_a_prompt_that_has_told_a_token_outlives_its_call(world: World) -> None:
    """The router's stream of prefills breaks between the step and the answer."""
    call = await world.call(spec_of(length=6, max_tokens=3))
    world.thread.end(world.model.run(world.plan()))
    await asyncio.sleep(0)
    call.cancel()
    await world.drain()
    assert [output.index for output in world.told()] == [0, 1, 2]
    world.check_nothing_is_held()


async def test_ids_that_the_model_lacks_are_refused_before_any_block_is_taken(
    world: World,
) -> None:
    """They would fail the step of every request aboard."""
    bad = replace(spec_of("bad", length=6), token_ids=(1, 2, 3, VOCAB, 5, 6))
    assert isinstance(await world.refusal(bad), InvalidRequest)
    with pytest.raises(InvalidRequest):
        world.role.reserve(Offer("model", GEOMETRY, INCARNATION, "writer", bad))
    assert not world.thread.plans
    world.check_nothing_is_held()


async def test_a_prompt_takes_its_blocks_before_others_are_promised_any(world: World) -> None:
    """And none of those that were promised."""
    world.reserve(spec_of("promised", length=60, first=1))
    free = world.pool.available
    await world.call(spec_of("local", length=60, first=2))
    assert world.pool.available == free - 60 // SIZE
    with pytest.raises(NoRoom):
        world.reserve(spec_of("late", length=20, first=3))
    refused = await world.refusal(spec_of("later", length=20, first=4))
    assert isinstance(refused, NoRoom)
    assert refused.load is not None
    assert refused.load.free_blocks == free - 60 // SIZE
    # What was refused may come again, or elsewhere.
    world.role.abort(("local", 0))
    world.role.abort(("promised", 0))
    await world.drain()
    again = await world.call(spec_of("later", length=20, first=4))
    await world.drain()
    assert len(await again) == 1
    world.check_nothing_is_held()


async def test_preempted_sequences_and_full_batches_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, max_sequences=1)
    first = await world.call(spec_of("first", max_tokens=9))
    assert isinstance(await world.refusal(spec_of("second", first=3)), NoRoom)
    first.cancel()
    await settle()
    await world.drain()
    world.check_nothing_is_held()


def unexpected(response: prefill_pb2.PrefillResponse) -> None:
    raise AssertionError(f"sent {response}")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"incarnation": "decode-0:0"}, HandoffError),
        ({"length": 64}, InvalidRequest),
        ({"max_tokens": 0}, InvalidRequest),
    ],
)
async def test_what_is_refused_at_once(
    world: World, change: dict[str, object], error: type[BatonError]
) -> None:
    incarnation = str(change.pop("incarnation", INCARNATION))
    spec = spec_of(**change)  # type: ignore[arg-type]
    with pytest.raises(error):
        await world.run(spec, unexpected, incarnation=incarnation)
    world.check_nothing_is_held()


async def test_a_call_that_ends_before_the_first_token_ends_the_sequence(world: World) -> None:
    call = await world.call(spec_of(length=40))
    await world.step()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await world.drain()
    assert world.told() == []
    world.check_nothing_is_held()


async def test_a_call_that_ends_after_the_first_token_leaves_it_running(world: World) -> None:
    def send(response: prefill_pb2.PrefillResponse) -> None:
        assert response.HasField("first_token")
        call.cancel()

    call = asyncio.create_task(world.run(spec_of(max_tokens=3), send))
    await settle()
    await world.step()
    with pytest.raises(asyncio.CancelledError):
        await call
    await world.drain()
    assert [output.index for output in world.told()] == [0, 1, 2]
    world.check_nothing_is_held()


async def test_an_attempt_is_placed_once(world: World) -> None:
    world.reserve(spec_of("handed over"))
    assert isinstance(await world.refusal(spec_of("handed over")), TicketEnded)
    world.role.abort(("handed over", 0))
    assert isinstance(await world.refusal(spec_of("handed over")), TicketEnded)
    call = await world.call(spec_of("local"))
    assert isinstance(await world.refusal(spec_of("local")), TicketEnded)
    with pytest.raises(TicketEnded):
        world.reserve(spec_of("local"))
    await world.drain()
    assert len(await call) == 1
    world.check_nothing_is_held()


async def test_an_abort_ends_it_in_every_state(world: World) -> None:
    world.role.abort(("early", 0))
    assert isinstance(await world.refusal(spec_of("early")), TicketEnded)
    fetching = await world.call(spec_of("fetching", length=20), HOLDER)
    assert world.asked.is_set()
    computing = await world.call(spec_of("computing", length=40, first=3))
    await world.step()
    for request, call in (("fetching", fetching), ("computing", computing)):
        world.role.abort((request, 0))
        world.holder_answers.set()
        with pytest.raises(TicketEnded):
            await call
    running = await world.call(spec_of("running", first=5, max_tokens=20))
    while not running.done():
        await world.step()
    world.told()
    world.role.abort(("running", 0))
    await world.drain()
    assert world.told() == []
    world.check_nothing_is_held()


async def test_what_a_holder_does_not_have_is_computed(world: World) -> None:
    world.holder_answers.set()
    call = await world.call(spec_of(length=20, max_tokens=1), HOLDER)
    assert world.asked.is_set()
    await world.drain()
    (response,) = await call
    assert response.computed_tokens == 20
    world.check_nothing_is_held()


async def test_what_a_holder_has_is_not_computed(world: World) -> None:
    spec = spec_of(length=20, max_tokens=2)
    world.held = spec.token_ids
    world.holder_answers.set()
    call = await world.call(spec, HOLDER)
    await world.drain()
    (response,) = await call
    assert (response.cached_prompt_tokens, response.computed_tokens) == (16, 4)
    expected, _ = answer(spec, (), 64)
    assert [output.token_ids for output in world.told()] == [(token,) for token in expected[20:]]
    world.check_nothing_is_held()


@pytest.mark.parametrize("held", [0, 8, 20])
async def test_room_that_goes_while_blocks_are_fetched(world: World, held: int) -> None:
    spec = spec_of("local", length=40)
    world.held = spec.token_ids[:held]
    call = await world.call(spec, HOLDER)
    assert world.asked.is_set()
    others = [spec_of("one", length=60, first=3), spec_of("two", length=31, first=5)]
    for other in others:
        world.reserve(other)
    world.holder_answers.set()
    with pytest.raises(NoRoom):
        await call
    for other in others:
        world.role.abort((other.request_id, 0))
    world.check_nothing_is_held()


async def test_an_abort_while_blocks_are_fetched_gives_them_back(world: World) -> None:
    spec = spec_of(length=20)
    world.held = spec.token_ids
    call = await world.call(spec, HOLDER)
    world.role.abort(("r", 0))
    world.holder_answers.set()
    with pytest.raises(TicketEnded):
        await call
    assert not world.thread.plans
    world.check_nothing_is_held()


async def test_nothing_is_fetched_for_a_prompt_that_is_refused(world: World) -> None:
    world.reserve(spec_of("promised", length=60))
    world.reserve(spec_of("promised too", length=60, first=3))
    call = await world.call(spec_of("local", length=20, first=5), HOLDER)
    with pytest.raises(NoRoom):
        await call
    assert not world.asked.is_set()
    for request in ("promised", "promised too"):
        world.role.abort((request, 0))
    world.check_nothing_is_held()


async def test_the_deadline_ends_it_within_a_step(world: World) -> None:
    call = await world.call(spec_of(length=60, deadline_s=0.15))
    await world.step(0.1)
    await world.step(0.1)
    assert not world.thread.plans
    with pytest.raises(DeadlineExceeded):
        await call
    assert [output.error_code for output in world.told()] == ["deadline_exceeded"]
    world.check_nothing_is_held()


async def test_an_engine_that_fails_and_a_worker_that_stops_fail_the_call(world: World) -> None:
    broken = await world.call(spec_of("broken"))
    await world.fail()
    with pytest.raises(WorkerFailed, match="RuntimeError"):
        await broken
    fetching = await world.call(spec_of("fetching", length=20), HOLDER)
    computing = await world.call(spec_of("computing", first=4))
    await world.role.close()
    world.holder_answers.set()
    for call in (fetching, computing):
        with pytest.raises(WorkerFailed, match="stopping"):
            await call
    await world.drain()
    world.check_nothing_is_held()
