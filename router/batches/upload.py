"""Receives an uploaded file: multipart/form-data (RFC 7578), bounded in size and time.

The file is passed on piece by piece as it arrives, and is not buffered here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from baton.errors import InvalidRequest, RequestTooLarge
from baton.liveness.listening import listening

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
_FORM_BYTES = (MAX_FIELDS + 1) * (MAX_FIELD_BYTES + 4096)
"""Maximum size of an upload's form without the file, in bytes."""
_PART_BYTES = 64
"""Number of bytes that each part of a form counts in addition to its headers and contents."""
_MAX_NAME_CHARACTERS = 255
_MAX_DIGITS = 12

Write = Callable[[bytes], Awaitable[None]]
"""Function that receives the next piece of an uploaded file."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What a form states about the file that it uploads."""

    filename: str
    purpose: str
    expires_s: int | None = None
    """Requested time for which the file is kept, in seconds; None: not given."""


async def receive_upload(
    request: Request, write: Write, max_bytes: int, deadline_s: float
) -> Upload:
    """Read a form that uploads a file, and pass the file to ``write``, piece by piece.

    Raises RequestTooLarge as early as possible, InvalidRequest, errors of ``write``, and
    ``starlette.requests.ClientDisconnect``.
    """
    form = _Form(_boundary(request, max_bytes))
    left = max_bytes + _FORM_BYTES
    size = 0
    try:
        async with listening(deadline_s):
            async for chunk in request.stream():
                left -= len(chunk)
                size += form.feed(chunk)
                if left < 0 or size > max_bytes:
                    raise _too_large(max_bytes)
                await write(b"".join(form.pieces))
                form.pieces.clear()
    except TimeoutError:
        raise InvalidRequest("the file did not arrive in time") from None
    if form.filename is None:
        raise InvalidRequest("file is required", param="file")
    if not form.ended:
        raise _no_form()
    if "purpose" not in form.fields:
        raise InvalidRequest("purpose is required", param="purpose")
    name = (form.filename or "file")[:_MAX_NAME_CHARACTERS]
    return Upload(name, form.fields["purpose"], _expires_s(form.fields))


@dataclass(slots=True)
class _Part:
    """A part of the form whose headers or contents are being read."""

    header: bytearray = field(default_factory=bytearray)
    value: bytearray = field(default_factory=bytearray)
    disposition: bytes = b""
    name: str = ""
    contents: bytearray = field(default_factory=bytearray)


class _Form:
    """The part of an upload's form that has been received so far."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """Name of the uploaded file; None until its part of the form has begun."""
        self.pieces: list[bytes] = []
        """Pieces of the file that were not passed on yet."""
        self.ended = False
        self._part = _Part()
        self._is_file = False
        self._left = _FORM_BYTES
        """Number of bytes that headers and fields may still take."""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begins,
                    "on_part_data": self._data,
                    "on_part_end": self._part_ends,
                    "on_header_field": self._header,
                    "on_header_value": self._value,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_end": self._ends,
                },
            )
        except FormParserError:
            raise _no_form() from None

    def feed(self, chunk: bytes) -> int:
        """Parse the next bytes; return how many belong to the file. Raises InvalidRequest."""
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _no_form() from None
        return sum(map(len, self.pieces))

    def _part_begins(self) -> None:
        self._part, self._is_file = _Part(), False
        self._spend(_PART_BYTES)

    def _header(self, data: bytes, start: int, end: int) -> None:
        self._spend(end - start)
        self._part.header += data[start:end]

    def _value(self, data: bytes, start: int, end: int) -> None:
        self._spend(end - start)
        self._part.value += data[start:end]

    def _header_ends(self) -> None:
        part = self._part
        if part.header.lower() == b"content-disposition":
            part.disposition = bytes(part.value)
        part.header, part.value = bytearray(), bytearray()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._part.disposition)
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        if b"filename" not in options:
            return
        if self._part.name != "file" or self.filename is not None:
            raise InvalidRequest("the form must have one file, named file", param="file")
        self._is_file = True
        self.filename = options[b"filename"].decode(errors="replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.pieces.append(data[start:end])
            return
        self._spend(end - start)
        self._part.contents += data[start:end]
        if len(self._part.contents) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"a field of the form has at most {MAX_FIELD_BYTES} bytes")

    def _part_ends(self) -> None:
        if self._is_file:
            return
        self.fields[self._part.name] = self._part.contents.decode(errors="replace")
        if len(self.fields) > MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields")

    def _ends(self) -> None:
        self.ended = True

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise InvalidRequest(f"the form without its file has at most {_FORM_BYTES} bytes")


def _expires_s(fields: dict[str, str]) -> int | None:
    """Return the time for which a file is kept, in seconds, from the two form fields of OpenAI;
    None: not given. Raises InvalidRequest."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after[anchor] must be 'created_at'", param="expires_after")
    if seconds is None or not (seconds.isascii() and seconds.isdecimal()):
        raise InvalidRequest("expires_after[seconds] must be a number", param="expires_after")
    return int(seconds[:_MAX_DIGITS])


def _boundary(request: Request, max_bytes: int) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind.lower() != b"multipart/form-data":
        raise InvalidRequest("the Content-Type must be multipart/form-data")
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or (length.isdecimal() and int(length) > max_bytes + _FORM_BYTES):
        raise _too_large(max_bytes)
    if not options.get(b"boundary"):
        raise _no_form()
    return options[b"boundary"]


def _no_form() -> InvalidRequest:
    return InvalidRequest("the body must be multipart/form-data with one file")


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the file is larger than {max_bytes} bytes")
