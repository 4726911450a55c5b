"""Traces in Mooncake's format: a JSON object a line, plain or gzipped.

``timestamp`` is in milliseconds from the start, ``input_length`` in tokens, ``hash_ids`` has one
number for each block of the prompt; equal leading numbers are equal prefixes. ``session_id`` is
read where it is given; what else a row has is not. Mooncake: Trading More Storage for Less
Computation, Qin et al., FAST 2025.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.hashing import block_hashes, hash_key

_GZIP_MAGIC = b"\x1f\x8b"
_ID_TOKENS = 2
"""A number of 64 bits is hashed as so many token ids of 32."""
_KEY = hash_key("trace")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a trace."""

    at_s: float
    """Seconds from the start."""
    prompt_tokens: int
    hash_ids: tuple[int, ...]
    session: str = ""

    def hashes(self) -> list[bytes]:
        """The chained hashes of its blocks, as the prefix index knows them."""
        packed = [part for one in self.hash_ids for part in (one & 0xFFFFFFFF, one >> 32)]
        return block_hashes(packed, _ID_TOKENS, _KEY)


def read_trace(path: Path) -> list[TraceRow]:
    """All rows in the order of their times. Raises ConfigError with the line at fault."""
    try:
        raw = path.read_bytes()
        if raw.startswith(_GZIP_MAGIC):
            raw = gzip.decompress(raw)
        lines = raw.decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ConfigError(f"the trace {path} has no rows")
    return sorted(rows, key=lambda row: row.at_s)


def scaled(rows: Sequence[TraceRow], divisor: float) -> list[TraceRow]:
    """With prompts ``divisor`` times shorter, at least one token long; blocks stay as they are."""
    return [
        TraceRow(
            row.at_s, max(1, math.ceil(row.prompt_tokens / divisor)), row.hash_ids, row.session
        )
        for row in rows
    ]


def _row(fields: Any) -> TraceRow:
    if not isinstance(fields, dict):
        raise ValueError("a row is a JSON object")
    at: Any = fields.get("timestamp")
    length, ids = fields.get("input_length"), fields.get("hash_ids")
    if not _is_number(at) or not 0 <= at < float("inf"):
        raise ValueError(f"timestamp must be a number of milliseconds from 0 on, not {at!r}")
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise ValueError(f"input_length must be a whole number of tokens, not {length!r}")
    if not isinstance(ids, list) or not all(_is_id(one) for one in ids):
        raise ValueError("hash_ids must be a list of whole numbers from 0 to 2^64-1")
    session = fields.get("session_id")
    return TraceRow(at / 1e3, length, tuple(ids), "" if session is None else str(session))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
