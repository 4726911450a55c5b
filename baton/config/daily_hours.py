"""Hours of each day in a time zone, such as 22:00-06:00 in Europe/Berlin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-4]):([0-5][0-9])", re.ASCII)
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class DailyHours:
    """A span of each day, which may include midnight. Times are Unix seconds."""

    text: str
    """``HH:MM-HH:MM``, as it was configured."""
    begin: int
    """Minute of the day at which the hours begin."""
    length: int
    """Length of the hours in minutes, on a day on which the clocks are not changed."""
    zone: tzinfo

    @classmethod
    def parse(cls, text: str, zone: str) -> DailyHours:
        """Read ``HH:MM-HH:MM`` and the name of a time zone. Raises ValueError."""
        match = _HOURS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not HH:MM-HH:MM, such as 22:00-06:00")
        first, last = (60 * int(match[n]) + int(match[n + 1]) for n in (1, 3))
        if last > _DAY_MINUTES:
            raise ValueError(f"{text!r}: a day ends at 24:00")
        length = (last - first) % _DAY_MINUTES
        if not length:
            raise ValueError(f"{text!r} is no part of a day; leave it empty for the whole day")
        return cls(text, first, length, time_zone(zone))

    def spans(self, start: float, end: float) -> list[tuple[float, float]]:
        """The hours between ``start`` and ``end``: begin and end of each span, in order."""
        return [
            (max(start, first), min(end, last))
            for first, last in self._days(start, end)
            if first < end and last > start
        ]

    def contain(self, at: float) -> bool:
        """Whether a moment is within the hours."""
        return any(first <= at < last for first, last in self._days(at, at))

    def next_begin(self, at: float) -> float:
        """Return the first moment from ``at`` on that is within the hours."""
        return min(max(at, first) for first, last in self._days(at, at) if last > at)

    def _days(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Yield the hours of each day, from the day before ``start`` to the day after ``end``."""
        day = datetime.fromtimestamp(start, self.zone).date() - timedelta(days=1)
        last_day = datetime.fromtimestamp(end, self.zone).date() + timedelta(days=1)
        while day <= last_day:
            midnight = datetime.combine(day, time())
            # Wall-clock time: a day on which the clocks change has an hour more or less.
            first, last = (
                (midnight + timedelta(minutes=minute)).replace(tzinfo=self.zone).timestamp()
                for minute in (self.begin, self.begin + self.length)
            )
            if first < last:
                yield first, last
            day += timedelta(days=1)


def seconds_of(spans: Sequence[tuple[float, float]], end: float) -> float:
    """Return how many seconds of ``spans`` lie before ``end``."""
    return sum(max(0.0, min(last, end) - first) for first, last in spans)


def time_zone(name: str) -> tzinfo:
    """The time zone of an IANA name. Raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(
            f"no time zone {name!r} is known here: write a name such as Europe/Berlin, and install"
            " the tzdata package if this machine has no time zone database"
        ) from None
