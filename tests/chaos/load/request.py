"""One request, sent straight to two workers as a router would."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from baton.errors import BatonError
from baton.request import SequenceSpec, TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_errors import error_from_rpc
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from router.workers.worker_link import PrefillStream
from tests.chaos.harness.worker_child import WorkerChild
from tests.support.mini_cluster import worker_channel

DEADLINE_S = 90.0


class Request:
    """Use it as a context; leaving it ends its calls."""

    def __init__(
        self,
        prefill: WorkerChild,
        decode: WorkerChild,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: bytes,
    ) -> None:
        """``salt``: requests of another one share no cached blocks with it."""
        self.is_committed = False
        self.tokens: dict[int, int] = {}
        """By output index."""
        self.finished = asyncio.Event()
        """The last token has come."""
        self._prefill = prefill
        self._decode = decode
        self._spec = SequenceSpec(
            request_id=secrets.token_hex(8),
            attempt=0,
            router_id=secrets.token_hex(8),
            token_ids=prompt,
            prompt_length=len(prompt),
            sampling=sampling,
            cache_salt=salt,
            deadline_s=DEADLINE_S,
        )

    async def __aenter__(self) -> Self:
        self._channels = [
            worker_channel(self._prefill.address),
            worker_channel(self._decode.address),
        ]
        opened = asyncio.Event()
        self._stream = asyncio.create_task(self._read_tokens(opened))
        async with asyncio.timeout(DEADLINE_S):
            await opened.wait()
        self.prefill = asyncio.create_task(self._run_prefill())
        """Its result: how the call to the prefill worker ended."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks = (self.prefill, self._stream)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()
        for task in tasks:
            if error is None and not task.cancelled():
                # What they return is for the test to judge; what they raise is always wrong.
                task.result()

    async def _run_prefill(self) -> BatonError | None:
        request = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(self._spec),
            decode_address=self._decode.address,
            decode_incarnation=self._decode.incarnation,
        )
        stream = PrefillStream(self._channels[0], self._prefill.incarnation)
        try:
            async with asyncio.timeout(DEADLINE_S), aclosing(stream.run(request)) as responses:
                async for response in responses:
                    if response.HasField("first_token"):
                        self._take(convert.output_from_proto(response.first_token))
                    else:
                        self.is_committed = True
        except BatonError as error:
            return error
        finally:
            await stream.close()
        return None

    async def _read_tokens(self, opened: asyncio.Event) -> BatonError | None:
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels[1])
        request = decode_pb2.StreamTokensRequest(router_id=self._spec.router_id)
        try:
            async for response in stub.StreamTokens(request, timeout=DEADLINE_S):
                opened.set()
                for output in response.outputs:
                    self._take(convert.output_from_proto(output))
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error, self._decode.incarnation)
        return None

    def _take(self, output: TokenOutput) -> None:
        assert output.request_id == self._spec.request_id
        assert not output.error, output.error
        for number, token in enumerate(output.token_ids, output.index):
            assert self.tokens.setdefault(number, token) == token, "a token changed"
        if output.finish_reason is not None:
            self.finished.set()

    async def answer(self) -> tuple[int, ...]:
        """All tokens. Raises what the prefill worker's call ended with."""
        async with asyncio.timeout(DEADLINE_S):
            error = await self.prefill
            if error is not None:
                raise error
            await self.finished.wait()
        return self.so_far()

    def so_far(self) -> tuple[int, ...]:
        """The tokens up to the first that is missing."""
        return tuple(self.tokens[number] for number in range(len(self.tokens)))
