"""Recorded traffic: arrival times, lengths, and common prefixes of prompts.

There are two formats, distinguished by their first character, each plain or gzipped:

- Mooncake's, a JSON object per line: ``timestamp`` in milliseconds, ``input_length`` and
  ``output_length`` in tokens, and, if known, ``hash_ids``: a number for each block of
  ``MOONCAKE_BLOCK_TOKENS`` of the prompt; equal leading numbers are equal prefixes. ``session_id``
  is optional. Mooncake: Trading More Storage for Less Computation, Qin et al., FAST 2025.
- Azure's, CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens. Splitwise: Efficient
  generative LLM inference using phase splitting, Patel et al., ISCA 2024.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.hashing import block_hashes, hash_key

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of the prompt per number of ``hash_ids``."""
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_GZIP_MAGIC = b"\x1f\x8b"
_MIN_SPAN_S = 1e-9
_ID_TOKENS = 2
"""Number of 32-bit token ids as which a 64-bit number of a trace is hashed."""
_KEY = hash_key("trace")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One row of a trace: when a request arrived, and its lengths."""

    arrival_s: float
    """Arrival time after the trace's first request, in seconds."""
    input_tokens: int
    """Tokens of the prompt; at least 1."""
    output_tokens: int
    """Tokens of the answer; at least 1."""
    block_hashes: tuple[int, ...] = ()
    """A number of at most 64 bits for each block of the prompt, including a partial last one. Equal
    leading numbers are equal prefixes. Empty if the trace has no prefixes."""
    session: str = ""
    """The request's conversation; empty if the trace does not give it."""

    def chained_hashes(self) -> list[bytes]:
        """Return the chained hashes of the prompt's blocks, 16 bytes each, in the prefix index's
        form.
        """
        packed = [part for one in self.block_hashes for part in (one & 0xFFFFFFFF, one >> 32)]
        return block_hashes(packed, _ID_TOKENS, _KEY)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace: all requests in the order of their arrival times; at least one."""

    requests: tuple[TracedRequest, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    """Tokens per number of ``block_hashes``, after scaling."""

    @property
    def span_s(self) -> float:
        """Return the time from the trace's first request to its last, in seconds."""
        return self.requests[-1].arrival_s

    def scaled(self, scale_time: float, scale_length: float) -> Trace:
        """Divide times by ``scale_time``, and lengths and blocks by ``scale_length``.

        Lengths are rounded up, blocks are rounded. Twice ``scale_time`` gives twice the rate.
        Raises ConfigError unless both are above 0.
        """
        for name, scale in (("time", scale_time), ("length", scale_length)):
            if not 0 < scale < math.inf:
                raise ConfigError(f"the scale of {name} must be a number above 0, not {scale:g}")
        requests = (
            replace(
                request,
                arrival_s=request.arrival_s / scale_time,
                input_tokens=math.ceil(request.input_tokens / scale_length),
                output_tokens=math.ceil(request.output_tokens / scale_length),
            )
            for request in self.requests
        )
        return Trace(tuple(requests), max(1, round(self.block_tokens / scale_length)))

    def within(self, max_tokens: int) -> Trace:
        """Shorten prompts and answers so that both fit in a context of ``max_tokens``, at least 2.

        An answer keeps at most half of ``max_tokens``.
        """
        requests = []
        for request in self.requests:
            answer = min(request.output_tokens, max_tokens // 2)
            prompt = min(request.input_tokens, max_tokens - answer)
            requests.append(replace(request, input_tokens=prompt, output_tokens=answer))
        return replace(self, requests=tuple(requests))

    def at_rate(self, rate: float, seconds: float) -> Iterator[TracedRequest]:
        """Yield rows for ``rate`` requests per second, with gaps scaled to fill ``seconds``.

        The trace starts again after its last row. Raises ConfigError if all requests arrive at the
        same time.
        """
        size = len(self.requests)
        if self.span_s <= 0:
            raise ConfigError(
                "a trace whose requests all arrive at the same time cannot be scaled to a rate"
            )
        # The gap after the last row is the mean of the others.
        turn_s = self.span_s * size / (size - 1)
        places = [divmod(number, size) for number in range(max(1, round(rate * seconds)) + 1)]
        times = [turn * turn_s + self.requests[place].arrival_s for turn, place in places]
        scale = seconds / max(times[-1], _MIN_SPAN_S)
        for (_, place), at_s in zip(places[:-1], times, strict=False):
            yield replace(self.requests[place], arrival_s=at_s * scale)


def read_trace(path: Path, scale_time: float = 1.0, scale_length: float = 1.0) -> Trace:
    """Read a trace of either format, and divide its times and lengths by the two scales as
    ``Trace.scaled`` does.

    Raises ConfigError that names the file, and the line at fault.
    """
    text = _text(path)
    rows = _mooncake(path, text) if text.lstrip().startswith("{") else _azure(path, text)
    requests = sorted(rows, key=lambda request: request.arrival_s)
    if not requests:
        raise ConfigError(f"the trace {path} has no rows")
    first_s = requests[0].arrival_s
    whole = Trace(
        tuple(replace(request, arrival_s=request.arrival_s - first_s) for request in requests)
    )
    return whole.scaled(scale_time, scale_length)


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def _mooncake(path: Path, text: str) -> Iterator[TracedRequest]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield _mooncake_row(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def _mooncake_row(fields: Any) -> TracedRequest:
    if not isinstance(fields, dict):
        raise ValueError("a row must be a JSON object")
    at: Any = fields.get("timestamp")
    if not _is_number(at) or not 0 <= at < math.inf:
        raise ValueError(f"timestamp must be a number of milliseconds from 0 on, not {at!r}")
    prompt = _length("input_length", fields.get("input_length"))
    answer = _length("output_length", fields.get("output_length"))
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(_is_id(one) for one in ids):
        raise ValueError("hash_ids must be a list of whole numbers from 0 to 2^64-1")
    session = fields.get("session_id")
    name = "" if session is None else str(session)
    return TracedRequest(at / 1e3, prompt, answer, tuple(ids), name)


def _length(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number of tokens, not {value!r}")
    return max(1, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _azure(path: Path, text: str) -> Iterator[TracedRequest]:
    rows = csv.DictReader(io.StringIO(text))
    if not set(_AZURE_COLUMNS) <= set(rows.fieldnames or ()):
        raise ConfigError(
            f"{path} is not a trace: it has neither rows of JSON nor the columns "
            f"{', '.join(_AZURE_COLUMNS)}"
        )
    first: datetime | None = None
    for row in rows:
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            first = first or at
            yield TracedRequest(
                (at - first).total_seconds(),
                _length("ContextTokens", int(row["ContextTokens"])),
                _length("GeneratedTokens", int(row["GeneratedTokens"])),
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {rows.line_num}: {error}") from error
