"""JSON answers of bounded memory: long lists are made and encoded while the client reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http.client import unless_disconnected

_ITEMS_AT_ONCE = 32
"""Number of list items that are made per step. An item may be a token with 20 alternatives: about 2
ms of the event loop."""
PART_CHARACTERS = 32 << 10
"""Minimum size of one write to the client, in characters."""


class Items:
    """A list in an answer whose items are made as they are sent. It can be read only once."""

    def __init__(self, items: Iterable[Any], at_once: int = _ITEMS_AT_ONCE) -> None:
        """Create a list of JSON values. ``at_once``: number of items that are made before control
        returns to the event loop."""
        self._items = items
        self.at_once = at_once

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class JsonStream(Response):
    """A JSON answer that may contain ``Items``. It ends if the client disconnects."""

    media_type = "application/json"

    def __init__(self, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        self._parts = _joined(json_parts(value))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, second = next(self._parts), next(self._parts, None)
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        if second is None:
            headers.append((b"content-length", str(len(first)).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        more = second is not None
        await send({"type": "http.response.body", "body": first, "more_body": more})
        if second is not None:
            await unless_disconnected(receive, self._send_rest(second, send))

    async def _send_rest(self, part: bytes, send: Send) -> None:
        body = {"type": "http.response.body", "more_body": True}
        await send({**body, "body": part})
        for another in self._parts:
            # Sending does not yield while the client's buffer has room.
            await asyncio.sleep(0)
            await send({**body, "body": another})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_parts(value: Any) -> Iterator[str]:
    """Encode a value, which may contain ``Items``, as JSON in parts."""
    match value:
        case Items():
            yield "["
            items, comma = iter(value), ""
            while some := list(islice(items, value.at_once)):
                yield comma + _to_json(some)[1:-1]
                comma = ","
            yield "]"
        case Mapping() if _has_items(value):
            yield "{"
            for place, (name, held) in enumerate(value.items()):
                yield f"{',' if place else ''}{_to_json(name)}:"
                yield from json_parts(held)
            yield "}"
        case list() if _has_items(value):
            yield "["
            for place, held in enumerate(value):
                yield "," if place else ""
                yield from json_parts(held)
            yield "]"
        case _:
            yield _to_json(value)


def without_items(value: Any) -> Any:
    """Return the value with plain lists in place of ``Items``."""
    match value:
        case Items():
            return list(value)
        case Mapping():
            return {name: without_items(held) for name, held in value.items()}
        case list():
            return [without_items(held) for held in value] if _has_items(value) else value
        case _:
            return value


def _has_items(value: Any) -> bool:
    match value:
        case Items():
            return True
        case Mapping():
            return any(map(_has_items, value.values()))
        case list():
            # Lists have items of one type, so the first one of a list of numbers decides.
            return (
                bool(value) and isinstance(value[0], dict | Items) and any(map(_has_items, value))
            )
        case _:
            return False


def _joined(parts: Iterator[str]) -> Iterator[bytes]:
    gathered: list[str] = []
    size = 0
    for part in parts:
        gathered.append(part)
        size += len(part)
        if size >= PART_CHARACTERS:
            yield "".join(gathered).encode()
            gathered, size = [], 0
    yield "".join(gathered).encode()


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
