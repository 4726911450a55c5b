"""An echo worker: both roles over real gRPC, in the real registry, without a model.

It answers a prompt at once and then one token a step, for all sequences in one message per router,
as a decode worker does. So a request's time, apart from the steps, is spent in the router. Run as a
module; see ``json_worker``. Everything is owned by the process's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import redis

from baton.request import Geometry, LoadSnapshot, PackedTokens
from baton.rpc import convert
from baton.rpc.grpc_channel import make_server
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
)
from loadtest.common.json_worker import Asker, Fields, run_helper
from loadtest.common.peer_servers import SERVED_NAME

_HEARTBEAT_S = 1.0
_TTL_S = 4.0
_GEOMETRY = Geometry(block_size=16, layers=1, kv_heads=1, head_dim=64, kv_dtype="bfloat16")
_BLOCKS = 1 << 20
_MAX_SEQUENCES = 4096
_TOKEN_IDS = 64
"""Number of different token ids in answers. An answer cycles through them, so that consecutive
tokens differ."""

Context = grpc.aio.ServicerContext[object, object]


@dataclass(slots=True)
class _Answer:
    """An answer whose tokens are still being sent."""

    router_id: str
    request_id: str
    attempt: int
    told: int
    """Number of the answer's tokens that were already sent."""
    tokens: int
    first_token_id: int
    number: int
    """The router's output number; 0 if it does not read packed tokens."""

    @property
    def is_packed(self) -> bool:
        """Whether the next token is sent packed, as a decode worker does it."""
        return self.number > 0 and self.told + 1 < self.tokens

    def next_token(self) -> worker_pb2.TokenOutput:
        index = self.told
        self.told += 1
        last = self.told == self.tokens
        return worker_pb2.TokenOutput(
            request_id=self.request_id,
            attempt=self.attempt,
            index=index,
            token_ids=(self.first_token_id + index % _TOKEN_IDS,),
            finish_reason=(
                inference_pb2.FINISH_REASON_LENGTH
                if last
                else inference_pb2.FINISH_REASON_UNSPECIFIED
            ),
        )


class _Mail:
    """Messages that the echo worker still has to send to one router."""

    def __init__(self) -> None:
        self.outputs: list[worker_pb2.TokenOutput] = []
        self.tokens = PackedTokens()
        self.filled = asyncio.Event()


class EchoWorker(
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
):
    """Implements the prefill and the decode service. A step takes ``step_s`` seconds. If it is 0,
    all tokens of an answer are sent at once.

    While ``step_s`` is None, answers pause after their first token.
    """

    def __init__(self, first_token_id: int) -> None:
        self.step_s: float | None = 0.0
        self._first_token_id = first_token_id
        self.steps_missed = 0
        """Number of steps that began late by at least the duration of a step. If there are any,
        this worker is too slow for the measurement."""
        self._answers: dict[tuple[str, int], _Answer] = {}
        self._mail: defaultdict[str, _Mail] = defaultdict(_Mail)
        self._begun = asyncio.Event()

    async def Prefills(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillsRequest], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillsResponse]:
        """Implement prefill.proto. Cancellations are ignored, since a prefill ends before its
        cancellation can arrive."""
        async for message in request_iterator:
            response = prefill_pb2.PrefillsResponse()
            for command in message.commands:
                if command.HasField("start"):
                    self._prefill(command.start.sequence, response)
            yield response

    def _prefill(
        self, spec: worker_pb2.SequenceSpec, message: prefill_pb2.PrefillsResponse
    ) -> None:
        name = spec.request_id
        for response in self._begin(spec):
            message.events.add(request_id=name, attempt=spec.attempt, response=response)
        end = prefill_pb2.PrefillEnd()
        message.events.add(request_id=name, attempt=spec.attempt, end=end)

    def _begin(self, spec: worker_pb2.SequenceSpec) -> list[prefill_pb2.PrefillResponse]:
        """Return the messages that answer a prefill request, and start to decode its sequence."""
        answer = _Answer(
            router_id=spec.router_id,
            request_id=spec.request_id,
            attempt=spec.attempt,
            told=0,
            tokens=spec.sampling.max_tokens,
            first_token_id=self._first_token_id,
            number=spec.output_number,
        )
        first = answer.next_token()
        responses = [prefill_pb2.PrefillResponse(first_token=first)]
        if answer.told < answer.tokens:
            handoff = prefill_pb2.HandoffCommitted()
            responses.append(prefill_pb2.PrefillResponse(handoff=handoff))
            # The token is sent again, as a decode worker does.
            self._tell(answer.router_id, first)
            self._answers[(answer.request_id, answer.attempt)] = answer
            if self.step_s == 0:
                self._tell_all(answer)
            self._begun.set()
        return responses

    def pace(self, step_s: float | None) -> None:
        """Set the duration of all further steps to ``step_s`` seconds; None pauses the answers."""
        self.step_s = step_s
        self._begun.set()

    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: Context
    ) -> decode_pb2.AbortResponse:
        """Implement decode.proto."""
        self._answers.pop((request.request_id, request.attempt), None)
        return decode_pb2.AbortResponse()

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        """Implement decode.proto."""
        mail = self._mail[request.router_id]
        yield self._message([], PackedTokens())
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await mail.filled.wait()
            mail.filled.clear()
            outputs, mail.outputs = mail.outputs, []
            tokens, mail.tokens = mail.tokens, PackedTokens()
            yield self._message(outputs, tokens)

    def _message(
        self, outputs: list[worker_pb2.TokenOutput], tokens: PackedTokens
    ) -> decode_pb2.StreamTokensResponse:
        load = worker_pb2.LoadSnapshot(free_blocks=_BLOCKS, running=len(self._answers))
        packed = convert.tokens_to_proto(tokens) if tokens.numbers else None
        return decode_pb2.StreamTokensResponse(outputs=outputs, load=load, tokens=packed)

    def _tell(self, router_id: str, output: worker_pb2.TokenOutput) -> None:
        mail = self._mail[router_id]
        mail.outputs.append(output)
        mail.filled.set()

    def _tell_next(self, answer: _Answer) -> None:
        if not answer.is_packed:
            self._tell(answer.router_id, answer.next_token())
            return
        mail, index = self._mail[answer.router_id], answer.told
        answer.told += 1
        mail.tokens.add(answer.number, index, (answer.first_token_id + index % _TOKEN_IDS,))
        mail.filled.set()

    def _tell_all(self, answer: _Answer) -> None:
        while answer.told < answer.tokens:
            self._tell_next(answer)
        del self._answers[(answer.request_id, answer.attempt)]

    async def run_steps(self) -> None:
        """Run steps until cancelled, at regular times. While no tokens are to be sent, wait."""
        while True:
            self._begun.clear()
            await self._begun.wait()
            due = time.monotonic()
            while self._answers and self.step_s:
                due += self.step_s
                late = time.monotonic() - due
                if late > self.step_s:
                    self.steps_missed += 1
                    due += late
                await asyncio.sleep(max(0.0, -late))
                self._step()

    def _step(self) -> None:
        for key, answer in list(self._answers.items()):
            self._tell_next(answer)
            if answer.told == answer.tokens:
                del self._answers[key]


def _records(address: str, context_length: int) -> list[WorkerRecord]:
    """Return the worker's registry records, one for each role, with the same address."""
    return [
        WorkerRecord(
            incarnation=f"echo-{role}-{secrets.token_hex(4)}",
            slot=f"{role}-0",
            role=role,
            address=address,
            metrics_address=address,
            model=SERVED_NAME,
            fingerprint="echo",
            geometry=_GEOMETRY,
            context_length=context_length,
            total_blocks=_BLOCKS,
            max_sequences=_MAX_SEQUENCES,
            load=LoadSnapshot(free_blocks=_BLOCKS),
        )
        for role in ("prefill", "decode")
    ]


async def _renew(registry: Registry, records: list[WorkerRecord]) -> None:
    """Renew the registry records periodically, as workers do. A router then finds them again after
    an outage of Redis."""
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            for record in records:
                await registry.put(record, _TTL_S)
        await asyncio.sleep(_HEARTBEAT_S)


async def _work(asker: Asker, start: Fields) -> None:
    # Handoffs are not implemented: no router reserves or commits.
    worker = EchoWorker(start["first_token_id"])  # type: ignore[abstract]
    server = make_server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = redis_client(start["redis_url"])
    records = _records(address, start["context_length"])
    tasks = [
        asyncio.create_task(worker.run_steps()),
        asyncio.create_task(_renew(Registry(client, start["cluster_id"]), records)),
    ]

    async def answer(question: Fields) -> Fields:
        worker.pace(question["step_s"])
        missed, worker.steps_missed = worker.steps_missed, 0
        return {"steps_missed": missed}

    try:
        asker.say({"address": address, "decode": records[1].incarnation})
        await asker.serve(answer)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(None)
        await client.aclose()


if __name__ == "__main__":
    asyncio.run(run_helper(_work))
