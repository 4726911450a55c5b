"""Links to workers over real gRPC connections: they follow the registry, break, and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, WorkerFailed
from baton.request import Geometry, LoadSnapshot, PackedTokens, TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_channel import listen, make_server, open_channel
from baton.rpc.worker_plane import WorkerPlane
from baton.security.tls import TlsFiles
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import decode_pb2, decode_pb2_grpc
from router.workers import worker_link, worker_links
from router.workers.worker_link import Abort, WorkerLink
from router.workers.worker_links import WorkerLinks
from tests.support.certificates import Authority
from tests.support.router.workers import record

DEADLINE_S = 60.0
OUTPUTS = [TokenOutput("r", 0, index, (index,)) for index in range(3)]


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """A decode worker with scripted messages; None ends the stream."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[TokenOutput | PackedTokens | None] = asyncio.Queue()
        self.streams = 0
        self.readers: list[str] = []
        self.aborted: list[tuple[str, int, int]] = []
        self.greets = True
        self.answers = asyncio.Event()
        """Whether it has answered an abort."""
        self.answers.set()

    async def StreamTokens(  # noqa: N802 - gRPC's name
        self,
        request: decode_pb2.StreamTokensRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        self.streams += 1
        self.readers.append(request.router_id)
        load = convert.load_to_proto(LoadSnapshot("d", running=self.streams))
        if self.greets:
            yield decode_pb2.StreamTokensResponse(load=load)
        while (output := await self.says.get()) is not None:
            if isinstance(output, PackedTokens):
                yield decode_pb2.StreamTokensResponse(
                    tokens=convert.tokens_to_proto(output), load=load
                )
                continue
            yield decode_pb2.StreamTokensResponse(
                outputs=[convert.output_to_proto(output)], load=load
            )

    async def Abort(  # noqa: N802
        self,
        request: decode_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> decode_pb2.AbortResponse:
        self.aborted.append((request.request_id, request.attempt, request.reason))
        await self.answers.wait()
        return decode_pb2.AbortResponse()


class World:
    """A worker, the links of a router, and what the router has heard."""

    def __init__(self, decode: Decode, address: str, tls: TlsFiles | None = None) -> None:
        self.decode = decode
        self.record = WorkerRecord(
            incarnation="d",
            slot="decode-0",
            role="decode",
            address=address,
            metrics_address="",
            model="tiny",
            fingerprint="f",
            geometry=Geometry(16, 2, 3, 64, "bfloat16"),
            context_length=2048,
            total_blocks=100,
            max_sequences=8,
        )
        self.heard: list[TokenOutput] = []
        self.broken: list[tuple[str, BatonError]] = []
        self.lost: list[str] = []
        self.draining: list[WorkerLink] = []
        self.bugs: list[Exception] = []
        """What is raised instead of hearing outputs, or of a broken stream."""
        self.links = self.subscribed(
            WorkerLinks("router", heartbeat_s=0.01, plane=WorkerPlane(tls))
        )

    def subscribed(self, links: WorkerLinks) -> WorkerLinks:
        links.subscribe(on_broken=self.on_broken, on_draining=self.draining.append)
        links.read("r", 0, self.hear, self.on_lost)
        return links

    def hear(self, output: TokenOutput) -> None:
        if self.bugs:
            raise self.bugs.pop()
        self.heard.append(output)

    def on_lost(self, error: Exception) -> None:
        self.lost.append(type(error).__name__)

    def on_broken(self, incarnation: str, error: BatonError) -> None:
        self.broken.append((incarnation, error))
        if self.bugs:
            raise self.bugs.pop()

    def is_up(self) -> bool:
        return bool(self.links.up("decode"))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def open_world(
    shown: TlsFiles | None = None, to: TlsFiles | None = None
) -> AsyncIterator[World]:
    """``shown`` by the worker that receives these from the router; None without TLS."""
    server, decode = make_server(), Decode()  # type: ignore[abstract]
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
    port = listen(server, "127.0.0.1:0", shown)
    await server.start()
    world = World(decode, f"127.0.0.1:{port}", to)
    try:
        yield world
    finally:
        try:
            await world.links.close()
        finally:
            # One that runs on is stopped by the garbage collector, which may wait for ever.
            await server.stop(None)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_links, "RECONNECT_S", 0.01)
    monkeypatch.setattr(worker_links, "MOMENT_S", 0.01)
    monkeypatch.setattr(worker_link, "_COOL_DOWN_S", 0.0)


async def test_a_link_is_up_once_its_stream_has_spoken() -> None:
    async with open_world() as world:
        world.decode.greets = False
        world.links.update({"d": world.record})
        await world.until(lambda: world.decode.streams)
        assert not world.is_up()
        world.decode.says.put_nowait(OUTPUTS[0])
        await world.until(world.is_up)
        assert world.decode.readers == ["router"]
        assert world.heard == OUTPUTS[:1]


async def test_a_worker_of_another_secret_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """A router of another launch would say only that no worker is ready."""
    server, decode = WorkerPlane.of(None, 32 * "a").server(), Decode()  # type: ignore[abstract]
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
    port = listen(server, "127.0.0.1:0", None)
    await server.start()
    world = World(decode, f"127.0.0.1:{port}")
    plane = WorkerPlane.of(None, 32 * "b")
    world.links = world.subscribed(WorkerLinks("router", heartbeat_s=0.01, plane=plane))
    try:
        world.links.update({"d": world.record})
        await world.until(lambda: len(world.broken) > 2)
        assert not world.is_up()
        assert decode.streams == 0
        told = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
        assert len(told) == 1
        assert "worker d rejects this router" in told[0]
        assert "BATON_CLUSTER_SECRET" in told[0]
    finally:
        await world.links.close()
        await server.stop(None)


async def test_outputs_and_loads_are_passed_on() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        for output in OUTPUTS:
            world.decode.says.put_nowait(output)
        await world.until(lambda: len(world.heard) == len(OUTPUTS))
        assert world.heard == OUTPUTS
        link = world.links.get("d")
        assert link is not None
        assert link.load == LoadSnapshot("d", running=1)
        world.links.update({"d": world.record})
        assert link.load == LoadSnapshot("d", running=1), "older than the stream's"
        assert world.broken == []


async def test_packed_tokens_reach_the_readers_of_their_choices() -> None:
    async with open_world() as world:
        heard: list[tuple[str, int, tuple[int, ...]]] = []

        def fail(index: int, token_ids: tuple[int, ...]) -> None:
            raise ValueError("a bug of what reads tokens")

        stop_reading = world.links.read(
            "s",
            1,
            world.hear,
            world.on_lost,
            {
                5: lambda index, token_ids: heard.append(("first", index, token_ids)),
                6: fail,
                7: lambda index, token_ids: heard.append(("third", index, token_ids)),
            },
        )
        world.links.update({"d": world.record})
        step = PackedTokens()
        for number, token_ids in ((5, (10,)), (6, (11,)), (4, (12,)), (7, (13, 14))):
            step.add(number, 3, token_ids)
        world.decode.says.put_nowait(step)
        world.decode.says.put_nowait(OUTPUTS[0])
        await world.until(lambda: world.heard)
        assert heard == [("first", 3, (10,)), ("third", 3, (13, 14))]
        assert world.lost == ["ValueError"], "an error concerns one request"
        stop_reading()
        world.decode.says.put_nowait(step)
        world.decode.says.put_nowait(OUTPUTS[1])
        await world.until(lambda: len(world.heard) == 2)
        assert len(heard) == 2
        assert world.broken == []


async def test_a_broken_stream_is_reported_and_opened_again() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        world.decode.greets = False
        world.decode.says.put_nowait(None)
        await world.until(lambda: world.decode.streams == 2)
        assert not world.is_up()
        assert [(name, type(error)) for name, error in world.broken] == [("d", WorkerFailed)]
        world.decode.says.put_nowait(OUTPUTS[0])
        await world.until(world.is_up)
        assert world.heard == OUTPUTS[:1]


async def test_a_silent_stream_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_links, "SILENCE_S", 5.0)
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        for now in range(6):
            world.links.listen(float(now))
        await asyncio.sleep(0)
        assert world.broken == []
        world.links.listen(6.0)
        await world.until(lambda: world.broken)
        await world.until(lambda: world.decode.streams >= 2)
        await world.until(world.is_up)


async def test_a_router_that_stood_still_breaks_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_links, "SILENCE_S", 5.0)
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        for now in (0.0, 1.0, 2.0, 3.0, 4.0, 34.0, 35.0, 36.0):
            world.links.listen(now)
        world.decode.says.put_nowait(OUTPUTS[0])
        await world.until(lambda: world.heard)
        for now in (95.0, 96.0, 97.0):
            world.links.listen(now)
        assert world.is_up()
        assert world.broken == []
        assert world.decode.streams == 1


async def test_slow_heartbeats_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose heartbeats are configured to be far apart."""
    monkeypatch.setattr(worker_links, "SILENCE_S", 5.0)
    async with open_world() as world:
        world.links = world.subscribed(WorkerLinks("router", heartbeat_s=10.0))
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        for now in range(30):
            world.links.listen(float(now))
        await asyncio.sleep(0)
        assert world.is_up()
        assert world.broken == []


async def test_a_worker_that_the_registry_forgot_is_kept_while_it_speaks() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        world.links.update({})
        assert world.is_up()
        world.decode.greets = False
        world.decode.says.put_nowait(None)
        await world.until(lambda: world.broken)
        world.links.update({})
        assert world.links.all() == []


async def test_a_worker_that_never_answers_is_tried_again_until_it_leaves() -> None:
    async with open_world() as world:
        world.links.update({"d": replace(world.record, address="127.0.0.1:1")})
        await world.until(lambda: len(world.broken) >= 2)
        assert all(isinstance(error, WorkerFailed) for _, error in world.broken)
        world.links.update({})
        assert world.links.all() == []


async def test_a_draining_worker_takes_no_requests() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        link = world.links.get("d")
        assert link is not None
        world.links.update({"d": replace(world.record, state="draining")})
        assert not world.is_up()
        assert world.links.get("d") is link
        world.links.update({"d": world.record})
        assert world.is_up()


async def test_outputs_of_no_reader_and_ends_without_listener_are_dropped() -> None:
    async with open_world() as world:
        stop_listening = world.links.subscribe(
            on_broken=lambda *_: pytest.fail("it has unsubscribed"), on_draining=lambda _: None
        )
        stop_reading = world.links.read("s", 0, lambda _: pytest.fail("it has left"), world.on_lost)
        stop_listening()
        stop_reading()
        stop_reading()
        world.links.update({"d": world.record})
        world.decode.says.put_nowait(TokenOutput("s", 0, 0, (1,)))
        world.decode.says.put_nowait(TokenOutput("r", 1, 0, (1,)))
        world.decode.says.put_nowait(OUTPUTS[0])
        await world.until(lambda: world.heard)
        world.decode.says.put_nowait(None)
        await world.until(lambda: world.broken)
        assert world.heard == OUTPUTS[:1]
        assert world.lost == []


async def test_draining_workers_are_reported_whenever_the_registry_is_read() -> None:
    async with open_world() as world:
        draining = replace(world.record, state="draining")
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        assert world.draining == []
        for _ in range(2):
            world.links.update({"d": draining})
        assert world.draining == [world.links.get("d")] * 2


async def test_a_connected_prefill_worker_that_the_registry_lost_is_left_alone() -> None:
    """It hangs, perhaps: its connection does not tell. A flushed registry is whole again sooner."""
    async with open_world() as world:
        record = replace(world.record, role="prefill")
        world.links.update({"d": record})
        await world.until(lambda: world.links.up("prefill"))
        world.links.update({})
        assert world.links.up("prefill"), "at once is too soon"
        await world.until(lambda: not world.links.up("prefill"))
        assert world.links.get("d") is not None
        world.links.update({"d": record})
        assert world.links.up("prefill")


async def test_a_prefill_worker_with_keepalives_is_kept_while_writes_are_blocked() -> None:
    """To the registry, that is."""
    async with open_world() as world:
        world.links.update({"d": replace(world.record, role="prefill")})
        await world.until(lambda: world.links.up("prefill"))
        link = world.links.get("d")
        assert link is not None
        # Three times as long as one that is silent is kept.
        for _ in range(9):
            link.prefills.messages += 1
            world.links.update({})
            assert world.links.up("prefill")
            await asyncio.sleep(0.01)
        # It says no more.
        await world.until(lambda: not world.links.up("prefill"))


async def test_aborts_say_why_and_never_raise() -> None:
    async with open_world() as world:
        await world.links.abort("unknown", "r", 0, stop=True)
        world.links.update({"d": world.record})
        await world.links.abort("d", "r", 1, stop=True)
        await world.links.abort("d", "s", 0, stop=False)
        stop, other = decode_pb2.ABORT_REASON_STOP, decode_pb2.ABORT_REASON_UNSPECIFIED
        assert world.decode.aborted == [("r", 1, stop), ("s", 0, other)]


async def test_closing_tells_those_who_wait() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        await world.links.close()
        assert [name for name, _ in world.broken] == ["d"]
        assert world.links.all() == []


@pytest.mark.parametrize("ticks", range(6))
async def test_closing_ends_even_if_a_message_arrives_at_that_moment(
    ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Call:
        def __init__(self) -> None:
            self.message = asyncio.get_running_loop().create_future()

        async def read(self) -> decode_pb2.StreamTokensResponse:
            await self.message
            self.message = asyncio.get_running_loop().create_future()
            return decode_pb2.StreamTokensResponse()

        def cancel(self) -> None:
            pass

    call = Call()
    stub = SimpleNamespace(StreamTokens=lambda request: call)
    monkeypatch.setattr(decode_pb2_grpc, "DecodeServiceStub", lambda channel: stub)
    world = World(Decode(), "127.0.0.1:1")  # type: ignore[abstract]
    world.links.update({"d": world.record})
    for count in (5, ticks):
        call.message.set_result(None)
        for _ in range(count):
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await world.links.close()


async def test_an_abort_whose_link_is_closed_meanwhile_raises_nothing() -> None:
    """gRPC reports it by a cancellation, which would end the caller that ends the request."""
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        world.decode.answers.clear()
        abort = asyncio.create_task(world.links.abort("d", "r", 2, stop=False))
        await world.until(lambda: world.decode.aborted)
        await world.links.close()
        await asyncio.wait_for(abort, DEADLINE_S)
        world.decode.answers.set()


async def test_aborts_that_did_not_arrive_are_sent_when_the_worker_is_heard() -> None:
    async with open_world() as world:
        world.links.update({"d": replace(world.record, address="127.0.0.1:1")})
        await world.until(lambda: world.broken)
        await world.links.abort("d", "r", 2, stop=False)
        link = world.links.get("d")
        assert link is not None
        assert len(link.owed) == 1
        assert world.decode.aborted == []
        link.channel, unreachable = open_channel(world.record.address), link.channel
        await unreachable.close()
        await world.until(lambda: world.decode.aborted)
        assert world.decode.aborted == [("r", 2, decode_pb2.ABORT_REASON_UNSPECIFIED)]
        assert not link.owed


async def test_links_are_closed_amid_an_abort_that_was_owed() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        world.decode.answers.clear()
        link = world.links.get("d")
        assert link is not None
        link.owed.append(Abort("r", 2, False, None))
        world.decode.says.put_nowait(OUTPUTS[0])
        await world.until(lambda: world.decode.aborted)
        await world.links.close()
        world.decode.answers.set()


async def test_renewed_certificates_are_shown_by_a_link_that_has_lost_its_worker(
    tmp_path: Path,
) -> None:
    """As after the old ones have ended: what the router showed at first lets it in no more."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    shown = TlsFiles.in_folder(old.folder, "router")
    async with open_world(TlsFiles.in_folder(new.folder, "worker"), shown) as world:
        world.links.update({"d": world.record})
        await world.until(lambda: world.broken)
        await world.links.abort("d", "r", 2, stop=False)
        refused = world.links.get("d")
        world.links.update({"d": world.record})
        assert world.links.get("d") is refused, "there is nothing else to show"
        for ours, theirs in zip(
            shown.paths, TlsFiles.in_folder(new.folder, "router").paths, strict=True
        ):
            theirs.replace(ours)
        world.links.update({"d": world.record})
        assert world.links.get("d") is not refused
        await world.until(world.is_up)
        link = world.links.get("d")
        world.links.update({"d": world.record})
        assert world.links.get("d") is link
        await world.until(lambda: world.decode.aborted)


async def test_a_suspect_takes_no_requests_until_it_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        link = world.links.get("d")
        assert link is not None
        link.suspect(time.monotonic())
        assert not world.is_up()
        world.decode.says.put_nowait(OUTPUTS[0])
        await world.until(world.is_up)
        link.suspect(time.monotonic() - worker_link.SUSPECT_S - 1.0)
        assert world.is_up(), "it is tried again, should it have nothing to say"


async def test_a_stalled_worker_takes_no_requests_until_a_step_ends() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        link = world.links.get("d")
        assert link is not None
        link.load = LoadSnapshot("d", engine_steps=7, steps_in_flight=1)
        link.stall()
        assert not world.is_up()
        link.load = LoadSnapshot("d", engine_steps=8, steps_in_flight=1)
        assert world.is_up()
        link.stall()
        link.load = LoadSnapshot("d", engine_steps=8)
        assert world.is_up(), "it has nothing to compute"


async def test_a_skipped_worker_serves_if_no_other_does() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record, "e": replace(world.record, incarnation="e")})
        await world.until(lambda: len(world.links.up("decode")) == 2)
        one, other = (world.links.get(name) for name in "de")
        assert one is not None
        assert other is not None
        now = time.monotonic()
        for n in range(3):
            one.breaker.broke(now - 2.0 + n)
        assert world.links.up("decode") == [other]
        assert [world.links.is_up(link) for link in (one, other)] == [False, True]
        other.suspect(now)
        assert world.links.up("decode") == [one]
        assert [world.links.is_up(link) for link in (one, other)] == [True, False]


async def test_openings_and_closings_of_breakers_are_counted() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    links = WorkerLinks("router", heartbeat_s=10.0, metrics=metrics)
    async with open_world() as world:
        try:
            links.update({"d": world.record})
            (link,) = links.all()
            for n in range(3):
                link.breaker.broke(float(n))

            def counted() -> list[float | None]:
                read, labels = metrics.registry.get_sample_value, {"worker": world.record.slot}
                names = "left_out", "readmitted"
                return [read(f"baton_{name}_workers_total", labels) for name in names]

            assert counted() == [1, None]
            link.breaker.ended_well(began_at=3.0, now=4.0)
            assert counted() == [1, 1]
        finally:
            await links.close()


async def test_where_no_worker_is_up_requests_wait_for_one_that_hangs() -> None:
    async with open_world() as world:
        world.links.update({"d": world.record, "e": replace(world.record, incarnation="e")})
        await world.until(lambda: len(world.links.up("decode")) == 2)
        one, other = world.links.all()
        one.suspect(time.monotonic())
        assert world.links.usable("decode") == [other]
        assert not world.links.is_usable(one)
        other.suspect(time.monotonic())
        assert world.links.up("decode") == []
        assert world.links.usable("decode") == [one, other]
        assert world.links.is_usable(one)
        world.links.update({"d": replace(world.record, state="draining"), "e": other.record})
        assert world.links.usable("decode") == [other]


async def test_workers_that_went_away_together_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_links, "MOMENT_S", 0.2)
    monkeypatch.setattr(worker_links, "RETURN_S", DEADLINE_S)
    async with open_world() as one, open_world() as other:
        links = one.links
        records = {"d": one.record, "e": replace(other.record, incarnation="e")}
        links.update(records)
        await one.until(lambda: len(links.up("decode")) == 2)
        assert not links.is_cut_off()
        for world in (one, other):
            world.decode.greets = False
            world.decode.says.put_nowait(None)
        await one.until(lambda: len(one.broken) == 2)
        assert links.is_cut_off()
        waiting = asyncio.create_task(links.returned(time.monotonic() + DEADLINE_S))
        one.decode.says.put_nowait(OUTPUTS[0])
        await one.until(lambda: links.up("decode"))
        assert not waiting.done(), "the other may be back as well"
        other.decode.says.put_nowait(OUTPUTS[1])
        await waiting
        assert len(links.up("decode")) == 2
        assert not links.is_cut_off()


async def test_one_worker_of_several_that_goes_away_is_not_awaited() -> None:
    async with open_world() as one, open_world() as other:
        one.links.update({"d": one.record, "e": replace(other.record, incarnation="e")})
        await one.until(lambda: len(one.links.up("decode")) == 2)
        one.decode.greets = False
        one.decode.says.put_nowait(None)
        await one.until(lambda: one.broken)
        assert not one.links.is_cut_off()
        await asyncio.sleep(0.02)
        other.decode.greets = False
        other.decode.says.put_nowait(None)
        await one.until(lambda: len(one.broken) == 2)
        assert not one.links.is_cut_off(), "they went one after the other"


async def test_an_output_that_cannot_be_taken_in_costs_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        world.bugs.append(MemoryError())
        for output in OUTPUTS:
            world.decode.says.put_nowait(output)
        await world.until(lambda: len(world.heard) == 2)
        assert world.lost == ["MemoryError"]
        assert "an output of request r cannot be processed" in caplog.text
        assert world.broken == []
        assert world.decode.streams == 1


async def test_a_stream_that_cannot_be_read_is_opened_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world() as world:
        world.links.update({"d": world.record})
        await world.until(world.is_up)
        with monkeypatch.context() as broken:
            broken.setattr(convert, "load_from_proto", lambda load: 1 / 0)
            # The callback may fail, too.
            world.bugs.append(RuntimeError("a bug of what moves requests"))
            world.decode.says.put_nowait(OUTPUTS[0])
            await world.until(lambda: world.broken)
            # No worker is blamed for it (``Failover.worker_broken``).
            assert not isinstance(world.broken[0][1], WorkerFailed)
        await world.until(world.is_up)
        world.decode.says.put_nowait(OUTPUTS[1])
        await world.until(lambda: world.heard)
        assert "worker d: its stream cannot be read" in caplog.text
        assert "worker d: the end of its stream could not be handled" in caplog.text


async def test_each_model_keeps_its_last_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breaker that excludes all workers of one model leaves its answers nothing else."""
    links = WorkerLinks("router", heartbeat_s=1.0)
    try:
        slots = {"d-0": "f", "d-1": "f", "d-2": "g"}
        links.update({slot: record(slot, fingerprint=name) for slot, name in slots.items()})
        one, other, last = links.all()
        for link in (one, other, last):
            assert link.follower is not None
            link.follower.cancel()
            link.connected = True
        monkeypatch.setattr(one.breaker, "allows", lambda _: False)
        monkeypatch.setattr(last.breaker, "allows", lambda _: False)
        assert links.up("decode") == [other, last]
        assert links.up("decode", "f") == [other]
        assert links.up("decode", "g") == [last]
        assert [links.is_up(link) for link in (one, other, last)] == [False, True, True]
        assert [links.is_reliable(link) for link in (one, other, last)] == [False, True, False]
        last.suspect(time.monotonic())
        assert links.up("decode", "g") == []
        assert links.usable("decode", "g") == [last]
        assert links.usable("decode") == [other, last]
    finally:
        await links.close()


async def test_workers_of_one_model_that_went_away_together_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_links, "RETURN_S", DEADLINE_S)
    async with open_world() as one, open_world() as other:
        links = one.links
        links.update(
            {"d": one.record, "e": replace(other.record, incarnation="e", fingerprint="g")}
        )
        await one.until(lambda: len(links.up("decode")) == 2)
        one.decode.greets = False
        one.decode.says.put_nowait(None)
        await one.until(lambda: links.is_cut_off("f"))
        assert not links.is_cut_off("g")
        assert not links.is_cut_off(), "a request that has not begun goes to the other model"
        one.decode.says.put_nowait(OUTPUTS[0])
        await links.returned(time.monotonic() + DEADLINE_S, "f")
        assert links.up("decode", "f")


async def test_the_last_workers_are_awaited_that_went_away_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_links, "RETURN_S", DEADLINE_S)
    async with open_world() as one, open_world() as other:
        links = one.links
        links.update({"d": one.record, "e": replace(other.record, incarnation="e")})
        await one.until(lambda: len(links.up("decode")) == 2)
        for number, world in enumerate((one, other), 1):
            world.decode.greets = False
            world.decode.says.put_nowait(None)
            await one.until(lambda n=number: len(one.broken) >= n)  # type: ignore[misc]
            await asyncio.sleep(0.02)
        assert not links.is_cut_off(), "either may have died"
        waiting = asyncio.create_task(links.returned(time.monotonic() + DEADLINE_S))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        other.decode.says.put_nowait(OUTPUTS[0])
        await waiting
        assert len(links.up("decode")) == 1
