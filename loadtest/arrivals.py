"""Requests of a recorded service: when they came, and how long they were."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from baton.errors import ConfigError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    """Seconds after the first one."""
    prompt_tokens: int
    answer_tokens: int


def read_arrivals(path: Path, scale_length: float = 1.0) -> tuple[Arrival, ...]:
    """The rows of a trace as Azure publishes them: CSV, plain or .gz.

    Columns TIMESTAMP, ContextTokens, GeneratedTokens; lengths are divided by ``scale_length`` and
    rounded up. Raises ConfigError that names the file and the line at fault.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content.startswith(_GZIP) else content).decode()
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    rows = csv.DictReader(io.StringIO(text))
    if not set(_COLUMNS) <= set(rows.fieldnames or ()):
        raise ConfigError(f"{path} has no columns {', '.join(_COLUMNS)}")
    found: list[Arrival] = []
    first: datetime | None = None
    for row in rows:
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            prompt, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            first = first or at
            found.append(
                Arrival(
                    (at - first).total_seconds(),
                    max(1, math.ceil(prompt / scale_length)),
                    max(1, math.ceil(answer / scale_length)),
                )
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {rows.line_num}: {error}") from error
    if len(found) < 2 or found[-1].at_s <= 0:
        raise ConfigError(f"{path} has fewer than two requests")
    return tuple(found)


def at_rate(trace: Sequence[Arrival], rate: float, seconds: float) -> Iterator[Arrival]:
    """As many rows as make ``rate`` requests a second, with their gaps scaled to fill ``seconds``.

    From its first row on; at its end the trace begins anew.
    """
    count = max(1, round(rate * seconds))
    turn_s = trace[-1].at_s * len(trace) / (len(trace) - 1)
    rows = [divmod(number, len(trace)) for number in range(count + 1)]
    times = [turn * turn_s + trace[place].at_s for turn, place in rows]
    scale = seconds / max(times[-1] - times[0], 1e-9)
    for (_, place), at_s in zip(rows[:-1], times, strict=False):
        row = trace[place]
        yield Arrival((at_s - times[0]) * scale, row.prompt_tokens, row.answer_tokens)
