"""Sends requests to a Baton cluster over gRPC."""

from __future__ import annotations

import time
from array import array

import grpc
import grpc.aio

from baton.client import grpc_wire as wire
from baton.errors import DeadlineExceeded, Overloaded, Unavailable, WorkerFailed
from baton.rpc.grpc_channel import open_channel
from baton.rpc.grpc_errors import error_from_rpc
from baton.security.tls import TlsFiles
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub
from baton.v1.sampling_pb2 import SamplingParameters
from loadtest.generator.results.request_record import Outcome, RequestRecord
from loadtest.generator.targets.target import AskOptions, RunClock, Target
from loadtest.generator.workload.prompts import PlannedRequest


class GrpcTarget(Target[pb.GenerateRequest]):
    """Sends requests by gRPC. It connects at the first request. It belongs to the event loop on
    which it is made."""

    def __init__(
        self,
        address: str,
        options: AskOptions,
        api_key: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        """``address`` is the host:port of a router's gRPC listener. Raises ConfigError."""
        self._options = options
        self._channel = open_channel(address, tls)
        self._stub = InferenceServiceStub(self._channel)
        self._metadata = wire.metadata(api_key)
        self._address = address

    def prepare(self, request: PlannedRequest) -> pb.GenerateRequest:
        """Implement ``Target``."""
        sampling = SamplingParameters(
            max_tokens=request.output_tokens,
            temperature=self._options.temperature,
            ignore_eos=self._options.ignore_eos,
        )
        message = pb.GenerateRequest(model=self._options.model, sampling=sampling)
        if isinstance(request.prompt, str):
            message.prompt = request.prompt
        else:
            message.token_ids.ids.extend(request.prompt)
        return message

    async def ask(
        self,
        request: PlannedRequest,
        prepared: pb.GenerateRequest,
        due_s: float,
        clock: RunClock,
    ) -> RequestRecord:
        """Implement ``Target``."""
        sent_s = clock.now()
        times: array[float] = array("d")
        usage = pb.Usage()
        outcome: Outcome = "ok"
        code = ""
        tokens = 0
        try:
            call = self._stub.Generate(
                prepared, timeout=self._options.timeout_s, metadata=self._metadata
            )
            async for message in call:
                if message.token_ids:
                    times.append(clock.since_start(time.perf_counter()))
                    tokens += len(message.token_ids)
                usage = message.usage if message.HasField("usage") else usage
            if not times:
                outcome, code = "error", "no_tokens"
        except grpc.aio.AioRpcError as error:
            outcome, code = _failure(error, self._address)
        return RequestRecord(
            number=request.number,
            due_s=due_s,
            sent_s=sent_s,
            ended_s=clock.now(),
            outcome=outcome,
            code=code,
            input_tokens=usage.prompt_tokens or request.input_tokens,
            output_tokens=usage.completion_tokens or tokens,
            cached_tokens=usage.cached_prompt_tokens,
            token_times_s=times,
        )

    async def close(self) -> None:
        """Implement ``Target``."""
        await self._channel.close()


def _failure(failure: grpc.aio.AioRpcError, address: str) -> tuple[Outcome, str]:
    """Return outcome and code of a failed request.

    If the server fails or cannot be reached, the outcome is ``error``, not ``shed``.
    """
    error = error_from_rpc(failure, address)
    if isinstance(error, DeadlineExceeded):
        return "aborted", "timeout"
    is_refusal = isinstance(error, Overloaded) or (
        isinstance(error, Unavailable) and not isinstance(error, WorkerFailed)
    )
    return "shed" if is_refusal else "error", error.code or ""
