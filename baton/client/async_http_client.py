"""A client of a router's HTTP front, for asyncio."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import httpx

from baton.client import http_wire as wire
from baton.client.http_client import COPY_BYTES, DEFAULT_URL
from baton.client.values import (
    NOTHING,
    Answer,
    BatchInfo,
    Embeddings,
    FileInfo,
    Message,
    ModelInfo,
    Piece,
    Sampling,
)
from baton.errors import DeadlineExceeded, WorkerFailed
from baton.tls import TlsFiles, client_context


class AsyncHttpClient:
    """As ``HttpClient``. Connects on first use; belongs to one event loop."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str = "",
        *,
        model: str = "",
        http: httpx.AsyncClient | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """``url`` is that of the HTTP front, without a path. ``model``: whose answers are wanted;

        the first one that is served by default. ``tls``: whom an https ``url`` must be vouched for
        by, and what it is shown. ``http``: a client of your own, for proxies; it stays open.
        Raises ConfigError where the files of ``tls`` cannot be used.
        """
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._model = model
        self._http = http or httpx.AsyncClient(
            trust_env=False, verify=True if tls is None else client_context(tls)
        )
        self._owns_http = http is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections."""
        if self._owns_http:
            await self._http.aclose()

    async def models(self) -> tuple[ModelInfo, ...]:
        """The models that are served."""
        return wire.models((await self._call("GET", "/v1/models")).json())

    # Answers

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float | None = None,
        options: Mapping[str, Any] = NOTHING,
    ) -> Answer:
        """Continue a conversation. ``options`` are further fields of the request's body."""
        return await self._whole(
            wire.CHAT, wire.chat_input(messages), sampling, deadline_s, options
        )

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float | None = None,
        options: Mapping[str, Any] = NOTHING,
    ) -> Answer:
        """Continue a text, or token ids."""
        return await self._whole(
            wire.COMPLETIONS, {"prompt": prompt}, sampling, deadline_s, options
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float | None = None,
        options: Mapping[str, Any] = NOTHING,
    ) -> AsyncGenerator[Piece, None]:
        """As ``chat``, while it is made. Closing the iterator aborts the request."""
        return self._stream(wire.CHAT, wire.chat_input(messages), sampling, deadline_s, options)

    def stream_completion(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float | None = None,
        options: Mapping[str, Any] = NOTHING,
    ) -> AsyncGenerator[Piece, None]:
        """As ``complete``, while it is made. Closing the iterator aborts the request."""
        return self._stream(wire.COMPLETIONS, {"prompt": prompt}, sampling, deadline_s, options)

    async def respond(
        self,
        given: str | Sequence[Message],
        sampling: Sampling | None = None,
        *,
        instructions: str = "",
        deadline_s: float | None = None,
        options: Mapping[str, Any] = NOTHING,
    ) -> Answer:
        """Answer a text, or messages, by the Responses API."""
        body = wire.response_body(
            given, await self._named(), sampling, instructions, options, stream=False
        )
        response = await self._call("POST", wire.RESPONSES, deadline_s, json=body)
        return wire.response_answer(response.json())

    async def stream_response(
        self,
        given: str | Sequence[Message],
        sampling: Sampling | None = None,
        *,
        instructions: str = "",
        deadline_s: float | None = None,
        options: Mapping[str, Any] = NOTHING,
    ) -> AsyncGenerator[Piece, None]:
        """As ``respond``, while it is made. Closing the iterator aborts the request."""
        body = wire.response_body(
            given, await self._named(), sampling, instructions, options, stream=True
        )
        pieces = self._events(
            wire.RESPONSES, body, deadline_s, wire.response_piece, wire.is_last_event
        )
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        deadline_s: float | None = None,
    ) -> Embeddings:
        """Embed texts, or lists of token ids; ``dimensions``: that many leading numbers alone.

        All inputs are of one kind.
        """
        body = wire.embeddings_body(inputs, await self._named(), dimensions)
        response = await self._call("POST", wire.EMBEDDINGS, deadline_s, json=body)
        return wire.embeddings(response.json())

    # Files and batches

    async def upload(
        self, content: bytes, filename: str = "batch.jsonl", *, expires_s: int | None = None
    ) -> FileInfo:
        """Upload a batch's input: lines of JSON. ``expires_s`` after that it is deleted."""
        form: dict[str, Any] = {
            "files": {"file": (filename, content)},
            "data": {"purpose": "batch", **wire.expiry(expires_s)},
        }
        return wire.file((await self._call("POST", "/v1/files", **form)).json())

    async def file(self, file_id: str) -> FileInfo:
        return wire.file((await self._call("GET", f"/v1/files/{file_id}")).json())

    async def download(self, file_id: str, path: Path) -> None:
        """Write a file's contents to ``path``. Raises OSError too."""
        headers, silence = wire.headers(self._api_key), wire.timeout(None)
        url = f"{self._url}/v1/files/{file_id}/content"
        try:
            async with self._http.stream("GET", url, headers=headers, timeout=silence) as response:
                if not response.is_success:
                    await response.aread()
                wire.checked(response)
                with await asyncio.to_thread(path.open, "wb") as file:
                    async for piece in response.aiter_bytes(COPY_BYTES):
                        await asyncio.to_thread(file.write, piece)
        except httpx.HTTPError as error:
            raise wire.unreachable(self._url, error) from error

    async def delete_file(self, file_id: str) -> None:
        await self._call("DELETE", f"/v1/files/{file_id}")

    async def create_batch(
        self,
        input_file_id: str,
        endpoint: str = wire.CHAT,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] = NOTHING,
    ) -> BatchInfo:
        """Begin a batch over an uploaded file."""
        body = {
            "input_file_id": input_file_id,
            "endpoint": endpoint,
            "completion_window": completion_window,
            "metadata": dict(metadata),
        }
        return wire.batch((await self._call("POST", "/v1/batches", json=body)).json())

    async def batch(self, batch_id: str) -> BatchInfo:
        """How far a batch has come."""
        return wire.batch((await self._call("GET", f"/v1/batches/{batch_id}")).json())

    async def cancel_batch(self, batch_id: str) -> BatchInfo:
        """End a batch early."""
        return wire.batch((await self._call("POST", f"/v1/batches/{batch_id}/cancel")).json())

    # How it is done

    async def _whole(
        self,
        path: str,
        what: Mapping[str, Any],
        sampling: Sampling | None,
        deadline_s: float | None,
        options: Mapping[str, Any],
    ) -> Answer:
        body = wire.generation_body(what, await self._named(), sampling, options, stream=False)
        response = await self._call("POST", path, deadline_s, json=body)
        return wire.answer(response.json())

    async def _stream(
        self,
        path: str,
        what: Mapping[str, Any],
        sampling: Sampling | None,
        deadline_s: float | None,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[Piece, None]:
        body = wire.generation_body(what, await self._named(), sampling, options, stream=True)
        pieces = self._events(path, body, deadline_s, wire.piece, wire.is_end)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _events(
        self,
        path: str,
        body: Mapping[str, Any],
        deadline_s: float | None,
        piece_of: Callable[[str], Piece | None],
        is_end: Callable[[str], bool],
    ) -> AsyncGenerator[Piece, None]:
        ended = False
        until = time.monotonic() + (math.inf if deadline_s is None else deadline_s + wire.GRACE_S)
        try:
            async with self._http.stream(
                "POST",
                self._url + path,
                json=body,
                headers=wire.headers(self._api_key, deadline_s),
                timeout=wire.timeout(deadline_s),
            ) as response:
                if not response.is_success:
                    await response.aread()
                wire.checked(response)
                async for line in response.aiter_lines():
                    # Read to its end: the connection is used again.
                    ended = ended or is_end(line)
                    if time.monotonic() > until:
                        raise DeadlineExceeded("the answer did not end before its deadline")
                    piece = piece_of(line)
                    if piece is not None:
                        yield piece
        except httpx.ReadTimeout as error:
            raise DeadlineExceeded("the answer did not come in time") from error
        except httpx.HTTPError as error:
            raise wire.unreachable(self._url, error) from error
        if not ended:
            raise WorkerFailed("the answer broke off")

    async def _named(self) -> str:
        if not self._model:
            self._model = (await self.models())[0].id
        return self._model

    async def _call(
        self, method: str, path: str, deadline_s: float | None = None, **content: Any
    ) -> httpx.Response:
        try:
            response = await self._http.request(
                method,
                self._url + path,
                headers=wire.headers(self._api_key, deadline_s),
                timeout=wire.timeout(deadline_s),
                **content,
            )
        except httpx.ReadTimeout as error:
            raise DeadlineExceeded("the answer did not come in time") from error
        except httpx.HTTPError as error:
            raise wire.unreachable(self._url, error) from error
        return wire.checked(response)
