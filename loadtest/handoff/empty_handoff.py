"""Measures the cost of a handoff without bytes: reserve and commit, with all blocks cached.

A real decode worker runs in a separate process. This process acts as prefill worker and router, by
gRPC. Handoffs are measured while the decode worker is idle, and while it runs a full batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from baton.errors import DeadlineExceeded, HandoffError
from baton.host.background import end_tasks
from baton.request import Geometry, SequenceSpec
from baton.rpc import convert
from baton.rpc.grpc_errors import error_from_rpc
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2, decode_pb2_grpc
from kvtransfer.pairs.pair import Identity
from kvtransfer.transports.transport import Peer
from loadtest.common.child_processes import bench_store
from loadtest.common.json_worker import Fields, helper
from loadtest.handoff.transfer_end import bench_pool, transfer_end
from loadtest.handoff.transfer_rows import EmptyHandoff
from worker.exchange.exchange import Exchange

EMPTY_PER_REPETITION = 20
"""Number of empty handoffs to measure for each repetition of the largest transfer in `baton bench
transfer`."""
_WRITER, _ROUTER = "writer", "router"
_READY_S = 300.0
_CALL_S = 30.0
_FIRST_TOKEN = 100
_PAUSES_S = 0.002, 0.03
"""Minimum and maximum pause between two handoffs, in seconds. The pauses are random, so that
handoffs arrive at any moment of a decode step."""


@dataclass(frozen=True, slots=True)
class EmptySettings:
    """Settings of a measurement of empty handoffs."""

    model: Path
    """Folder of the model in Hugging Face format."""
    model_name: str
    dtype: str = "bfloat16"
    prompt_blocks: int = 32
    """Length of the prompt in blocks. All of them are cached at the decode worker."""
    answer_tokens: int = 512
    """Length in tokens of each answer in the decode batch. When an answer ends, another one
    starts."""
    max_sequences: int = 64
    kv_pool_mib: int = 1024
    handoffs: int = 100
    """Number of measured handoffs to the idle decode worker, and also to the busy one."""


async def measure_empty_handoffs(settings: EmptySettings) -> EmptyHandoff:
    """Measure empty handoffs. Raises BatonError if the decode worker does not start, or refuses a
    handoff.
    """
    # The path is short, since a socket's path is limited.
    with tempfile.TemporaryDirectory(prefix="baton-") as name, bench_store(Path(name)) as url:
        start: Fields = {
            "model": str(settings.model),
            "dtype": settings.dtype,
            "redis_url": url,
            "core_board": str(Path(name) / "cores"),
            "max_sequences": settings.max_sequences,
            "kv_pool_mib": settings.kv_pool_mib,
        }
        log = Path(name) / "decode.log"
        async with (
            helper("loadtest.handoff.decode_host", start, log, ready_s=_READY_S) as host,
            _writer(host.hello, settings) as writer,
        ):
            await writer.fill()
            idle_ms = await writer.measure(settings.handoffs)
            await writer.run_batch(settings.max_sequences - 1)
            steps, began = writer.steps, time.perf_counter()
            busy_ms = await writer.measure(settings.handoffs)
            took, steps = time.perf_counter() - began, writer.steps - steps
            return EmptyHandoff(
                model=settings.model_name,
                idle_ms=idle_ms,
                busy_ms=busy_ms,
                batch=settings.max_sequences - 1,
                step_ms=took / max(1, steps) * 1e3,
            )


@contextlib.asynccontextmanager
async def _writer(hello: Fields, settings: EmptySettings) -> AsyncIterator[_Writer]:
    identity = Identity(_WRITER, hello["fingerprint"], Geometry(**hello["geometry"]))
    with bench_pool(settings.prompt_blocks, hello["block_bytes"]) as pool:
        # Random bytes as values could be denormal, with which a CPU is slow.
        pool.data[:] = 0
        async with transfer_end(identity, pool.memory, "shm") as exchange:
            writer = _Writer(exchange, hello, settings)
            reading = asyncio.create_task(writer.read_tokens(), name="tokens")
            try:
                yield writer
            finally:
                await end_tasks([reading, *writer.replacing])


class _Writer:
    """Acts as prefill worker and router towards the decode worker. All handoffs are of the same
    prompt.
    """

    def __init__(self, exchange: Exchange, hello: Fields, settings: EmptySettings) -> None:
        identity = exchange.identity
        self.steps = 0
        """Number of steps that the decode worker has run so far."""
        self.replacing: set[asyncio.Task[None]] = set()
        self._exchange = exchange
        self._peer = Peer(hello["incarnation"], hello["address"])
        self._stub = decode_pb2_grpc.DecodeServiceStub(exchange.channel(hello["address"]))
        size = settings.prompt_blocks * identity.geometry.block_size
        self._offer = decode_pb2.ReserveRequest(
            fingerprint=identity.fingerprint,
            geometry=convert.geometry_to_proto(identity.geometry),
            incarnation=self._peer.incarnation,
            writer=_WRITER,
        )
        self._spec = SequenceSpec(
            request_id="",
            attempt=0,
            router_id=_ROUTER,
            token_ids=tuple(_FIRST_TOKEN + n % 100 for n in range(size)),
            prompt_length=size,
            sampling=SamplingParams(
                temperature=0.0, max_tokens=settings.answer_tokens, ignore_eos=True
            ),
        )
        self._count = 0
        self._batch: set[str] = set()
        self._running = 0
        self._dice = random.Random(0)  # noqa: S311 - pauses, no secret

    async def fill(self) -> None:
        """Send the prompt's blocks to the decode worker, so that they are cached there."""
        reserved = await self._reserve("first")
        pair = await self._exchange.outbound(self._peer)
        push = pair.push(reserved.ticket_id)
        for target in range(reserved.missing_blocks):
            push.put(target, target, 0, self._exchange.receiver.block_bytes)
        push.end()
        async with asyncio.timeout(_CALL_S):
            await push.done
        await self._commit(reserved.ticket_id)
        await self._abort("first")

    async def measure(self, handoffs: int) -> float:
        """Return the median time of a handoff in milliseconds: of its reserve and commit calls
        together."""
        found = []
        for _ in range(handoffs):
            await asyncio.sleep(self._dice.uniform(*_PAUSES_S))
            name = self._new_name()
            began = time.perf_counter()
            await self._hand_over(name)
            found.append(time.perf_counter() - began)
            await self._abort(name)
        return statistics.median(found) * 1e3

    async def run_batch(self, sequences: int) -> None:
        """Start a batch of ``sequences`` sequences on the decode worker, and wait until all of them
        decode."""
        for _ in range(sequences):
            await self._add_to_batch()
        deadline = time.monotonic() + _CALL_S
        while self._running < sequences:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"only {self._running} of {sequences} sequences run")
            await asyncio.sleep(0.01)

    async def read_tokens(self) -> None:
        """Read the decode worker's tokens as a router does, and replace ended sequences of the
        batch.
        """
        call = self._stub.StreamTokens(decode_pb2.StreamTokensRequest(router_id=_ROUTER))
        async for message in call:
            self.steps = message.load.engine_steps
            self._running = message.load.running
            for output in message.outputs:
                if output.finish_reason and output.request_id in self._batch:
                    self._batch.discard(output.request_id)
                    task = asyncio.create_task(self._add_to_batch(), name="replace")
                    self.replacing.add(task)
                    task.add_done_callback(self.replacing.discard)

    async def _add_to_batch(self) -> None:
        name = self._new_name()
        self._batch.add(name)
        await self._hand_over(name)

    def _new_name(self) -> str:
        self._count += 1
        return f"empty-{self._count}"

    async def _hand_over(self, name: str) -> None:
        reserved = await self._reserve(name)
        if reserved.missing_blocks:
            raise HandoffError(f"{reserved.missing_blocks} blocks are no longer cached")
        await self._commit(reserved.ticket_id)

    async def _reserve(self, name: str) -> decode_pb2.ReserveResponse:
        request = decode_pb2.HandoffsRequest(reserve=self._offer)
        convert.write_sequence(request.reserve.sequence, replace(self._spec, request_id=name))
        return (await self._call(request)).reserve

    async def _commit(self, ticket_id: str) -> None:
        request = decode_pb2.HandoffsRequest()
        request.commit.ticket_id = ticket_id
        request.commit.writer = _WRITER
        request.commit.first_token = _FIRST_TOKEN
        await self._call(request)

    async def _call(self, request: decode_pb2.HandoffsRequest) -> decode_pb2.HandoffsResponse:
        """Call the decode worker's handoff service as a prefill worker does."""
        calls = self._exchange.handoff_calls(await self._exchange.outbound(self._peer))
        return await calls.call(request, _CALL_S)

    async def _abort(self, name: str) -> None:
        try:
            await self._stub.Abort(decode_pb2.AbortRequest(request_id=name), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._peer.incarnation) from error
