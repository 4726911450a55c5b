"""Takes in an uploaded file: multipart/form-data (RFC 7578), bounded in size and time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.types import Message

from baton.errors import InvalidRequest, RequestTooLarge
from baton.liveness.listening import listening

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
_FORM_BYTES = (MAX_FIELDS + 1) * (MAX_FIELD_BYTES + 4096)
"""What the form may take beside the file."""
_MAX_NAME_CHARACTERS = 255
_MAX_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Upload:
    """A file as it came."""

    filename: str
    purpose: str
    content: BinaryIO
    expires_s: int | None = None
    """How long it is to be kept, in seconds; None: nothing was said."""


@asynccontextmanager
async def uploaded(request: Request, max_bytes: int, deadline_s: float) -> AsyncIterator[Upload]:
    """The file of a form, until the block ends; a larger one is kept on the disk meanwhile.

    Raises RequestTooLarge as soon as that is known, InvalidRequest, and
    ``starlette.requests.ClientDisconnect``.
    """
    _check_headers(request, max_bytes)
    bounded = Request(request.scope, _Bounded(request, max_bytes).receive)
    try:
        async with listening(deadline_s):
            form = await bounded.form(
                max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
            )
    except TimeoutError:
        raise InvalidRequest("the file did not arrive in time") from None
    except (MultiPartException, HTTPException):
        raise InvalidRequest("the body is no multipart/form-data with one file") from None
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file is required", param="file")
        if not isinstance(purpose, str):
            raise InvalidRequest("purpose is required", param="purpose")
        if (file.size or 0) > max_bytes:
            raise _too_large(max_bytes)
        name = (file.filename or "file")[:_MAX_NAME_CHARACTERS]
        yield Upload(name, purpose, file.file, _expires_s(form))
    finally:
        await form.close()


def _expires_s(form: FormData) -> int | None:
    """OpenAI's two fields for it. Raises InvalidRequest."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after[anchor] must be 'created_at'", param="expires_after")
    if not (isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal()):
        raise InvalidRequest("expires_after[seconds] must be a number", param="expires_after")
    return int(seconds[:_MAX_DIGITS])


class _Bounded:
    """A request's body up to a size."""

    def __init__(self, request: Request, max_bytes: int) -> None:
        self._receive = request.receive
        self._max_bytes = max_bytes
        self._left = max_bytes + _FORM_BYTES

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _too_large(self._max_bytes)
        return message


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise InvalidRequest("the Content-Type must be multipart/form-data")
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or (length.isdecimal() and int(length) > max_bytes + _FORM_BYTES):
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the file is larger than {max_bytes} bytes")
