"""One request of a client, streamed over HTTP or gRPC. Owned by one event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx

from baton.rpc.grpc_errors import CODE_KEY, RETRY_KEY
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos.load.answer import AnswerSoFar, ChoiceSoFar
from tests.chaos.load.questions import Question, Way

GIVEN_UP_S = 120.0
"""A call that is silent for so long is lost: its router may have stood still for half of it."""
RESET = "connection_reset"
"""The connection broke before the answer had ended: no word of the cluster's."""
UNCLEAR = "unclear"
"""An error that is neither a broken connection nor one of Baton's own."""
NO_END = "no_end"
"""The stream ended in order, and the answer had not."""
SILENT = "silent"
"""Nothing came for ``GIVEN_UP_S``."""
NOT_CLEAR = frozenset({RESET, UNCLEAR, NO_END, SILENT})
"""Endings that are no clear error."""

_CHANNEL = (
    # A connection of its own, as another client has it, and patience while it is made.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", int(GIVEN_UP_S * 1000)),
)


@dataclass(frozen=True, slots=True)
class Fronts:
    """Where the cluster is asked."""

    http: str
    """host:port."""
    grpc: str
    """host:port."""
    model: str


@dataclass(slots=True, eq=False)
class Call:
    """One try of one request. Times are seconds of the monotonic clock."""

    question: Question
    way: Way
    answer: AnswerSoFar
    began: float = field(default_factory=time.monotonic)
    heard: float = 0.0
    """When the last piece came; 0 before the first."""
    ended: float = 0.0
    error: str = ""
    """A code of ``baton.errors`` or of ``NOT_CLEAR``; empty where there was none."""
    error_text: str = ""
    says_when: bool = True
    """Whether the error said when to come back; one within a stream need not."""
    own_port: int = 0
    """The TCP port on the client's side, over HTTP."""

    @classmethod
    def of(cls, question: Question, way: Way) -> Call:
        """A call that has not been made."""
        return cls(question, way, AnswerSoFar.empty(question.choices))

    @property
    def runs(self) -> bool:
        """Whether tokens have come, and it has not ended."""
        return self.heard > 0 and self.ended == 0

    async def run(self, fronts: Fronts) -> None:
        """Make it; ``error`` and ``answer`` have its result. Raises nothing of its own."""
        try:
            if self.way == "http":
                await self._over_http(fronts)
            else:
                await self._over_grpc(fronts)
        except TimeoutError:
            self._fail(SILENT, f"nothing came for {GIVEN_UP_S:.0f} s")
        finally:
            self.ended = time.monotonic()
        if not self.error and not self.answer.is_whole:
            self._fail(NO_END, "the stream ended without a finish reason")

    def _fail(self, code: str, text: str) -> None:
        self.error, self.error_text = code, text

    def _hear(self) -> None:
        self.heard = time.monotonic()

    async def _over_http(self, fronts: Fronts) -> None:
        client = httpx.AsyncClient(
            base_url=f"http://{fronts.http}",
            trust_env=False,
            timeout=httpx.Timeout(None),
            # To read the certificates would take longer than to answer.
            verify=False,
        )
        try:
            async with client, asyncio.timeout(GIVEN_UP_S) as patience:
                body = self.question.body(fronts.model)
                async with client.stream("POST", self.question.path, json=body) as response:
                    self._note_port(response)
                    await self._read_http(response, patience)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            self._fail(RESET, f"{type(error).__name__}: {error}")
        except httpx.TransportError as error:
            self._fail(UNCLEAR, f"{type(error).__name__}: {error}")

    def _note_port(self, response: httpx.Response) -> None:
        stream = response.extensions["network_stream"]
        self.own_port = stream.get_extra_info("client_addr")[1]

    async def _read_http(self, response: httpx.Response, patience: asyncio.Timeout) -> None:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            self.says_when = "retry-after" in response.headers
            self._fail_with(response.json()["error"])
            return
        async for event in _events(response):
            patience.reschedule(asyncio.get_running_loop().time() + GIVEN_UP_S)
            if "error" in event:
                self._fail_with(event["error"])
                return
            self._name(event.get("system_fingerprint"))
            for choice in event["choices"]:
                self._take_http(choice)
            self._hear()

    def _name(self, fingerprint: str | None) -> None:
        """Note the fingerprint that a piece names. An answer that names two is wrong."""
        known = self.answer.fingerprint
        if fingerprint and fingerprint != known:
            self.answer.fingerprint = f"{known} and {fingerprint}" if known else fingerprint

    def _fail_with(self, error: dict[str, Any]) -> None:
        self._fail(str(error.get("code") or error["type"]), str(error["message"]))

    def _take_http(self, piece: dict[str, Any]) -> None:
        choice = self.answer.choices[piece["index"]]
        choice.tokens += piece.get("token_ids") or ()
        delta = piece.get("delta", {})
        choice.text += piece.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            _add_call(choice, call["function"].get("name"), call["function"].get("arguments"))
        choice.finish_reason = piece.get("finish_reason") or choice.finish_reason

    async def _over_grpc(self, fronts: Fronts) -> None:
        async with grpc.aio.insecure_channel(fronts.grpc, options=_CHANNEL) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            stream = stub.Generate(self.question.message())
            try:
                async with asyncio.timeout(GIVEN_UP_S) as patience:
                    async for response in stream:
                        patience.reschedule(asyncio.get_running_loop().time() + GIVEN_UP_S)
                        self._take_grpc(response)
                        self._hear()
            except grpc.aio.AioRpcError as error:
                self._fail_with_status(error)

    def _fail_with_status(self, error: grpc.aio.AioRpcError) -> None:
        """Every error of Baton's names its code in a trailer."""
        trailers = dict(error.trailing_metadata() or ())
        code, status = trailers.get(CODE_KEY), error.code()
        self.says_when = self.heard > 0 or RETRY_KEY in trailers
        if code is not None:
            self._fail(str(code), str(error.details()))
        else:
            is_reset = status is grpc.StatusCode.UNAVAILABLE
            self._fail(RESET if is_reset else UNCLEAR, f"{status.name}: {error.details()}")

    def _take_grpc(self, response: inference_pb2.GenerateResponse) -> None:
        self._name(getattr(response, "fingerprint", None))
        choice = self.answer.choices[response.choice]
        choice.tokens += response.token_ids
        choice.text += response.text
        for part in response.tool_calls:
            _add_call(choice, part.name, part.arguments)
        if response.finish_reason:
            choice.finish_reason = inference_pb2.FinishReason.Name(response.finish_reason)


def _add_call(choice: ChoiceSoFar, name: str | None, arguments: str | None) -> None:
    if name:
        choice.calls += f"|{name}:"
    choice.calls += arguments or ""


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
