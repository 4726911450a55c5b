"""Routers' traffic in plain numbers: requests, their results, and rates between looks.

Plain Python, no I/O, no clock: ``now`` is passed in. A router's event loop owns the counts of its
process; the autoscaler reads those of all routers (``baton.autoscaling.traffic_store``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Self

TIGHT_SHARE = 0.5
"""A request is tight when it used more than this share of an SLO."""
FIRST_ANSWER_TOKENS = 256
"""Assumed length of an answer, in tokens, until a first answer has ended."""
SILENT_S = 5.0
"""A router that has not reported for this long makes the traffic unknown."""
GONE_S = 60.0
"""A router that has not reported for this long counts as gone."""
_WEIGHT = 0.1
"""Weight of the latest answer in the mean length of answers."""


class RunningMean:
    """An exponentially weighted mean of samples; None until the first one."""

    def __init__(self, weight: float) -> None:
        """Create a mean. ``weight`` is that of the newest sample, above 0 and at most 1."""
        self._weight = weight
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Update the mean with another sample."""
        known = sample if self.value is None else self.value
        self.value = known + self._weight * (sample - known)

    def forget(self) -> None:
        """Drop the mean; the next sample counts as the first one."""
        self.value = None


@dataclass(slots=True)
class TrafficCounts:
    """Totals since a router started, or the difference between two looks."""

    requests: float = 0.0
    """Number of received requests, including refused ones."""
    input_tokens: float = 0.0
    """Prompt tokens of all received requests, refused ones included."""
    expected_tokens: float = 0.0
    """Expected output tokens of all received requests, refused ones included."""
    shed: float = 0.0
    """Requests refused because of a full queue or a deadline."""
    first_tokens: float = 0.0
    """Requests that received their first token."""
    late_first_tokens: float = 0.0
    """First tokens that came later than the TTFT SLO."""
    tight_first_tokens: float = 0.0
    """First tokens later than ``TIGHT_SHARE`` of the SLO; late ones included."""
    answers: float = 0.0
    """Answers of at least two tokens that ended without an error."""
    slow_answers: float = 0.0
    """Answers whose time per token exceeds the SLO."""
    tight_answers: float = 0.0
    """Answers whose time per token exceeds ``TIGHT_SHARE`` of the SLO; slow ones included."""
    prefilled_tokens: float = 0.0
    """Prompt tokens that prefill workers completed, cached ones included."""
    prefill_s: float = 0.0
    """Engine seconds that prefill workers spent on ``prefilled_tokens``."""

    def judge_first_token(self, ttft_s: float, slo_s: float) -> None:
        """Count a request's first token and judge it by its SLO."""
        self.first_tokens += 1
        self.late_first_tokens += ttft_s > slo_s
        self.tight_first_tokens += ttft_s > TIGHT_SHARE * slo_s

    def judge_answer(self, tpot_s: float, slo_s: float) -> None:
        """Count an answer of at least two tokens and judge it by its SLO."""
        self.answers += 1
        self.slow_answers += tpot_s > slo_s
        self.tight_answers += tpot_s > TIGHT_SHARE * slo_s

    def since(self, earlier: Self) -> Self:
        """Return these totals minus earlier ones."""
        return type(self)(**{name: getattr(self, name) - getattr(earlier, name) for name in NAMES})

    @classmethod
    def total(cls, parts: Iterable[Self]) -> Self:
        """Return the sum of several totals."""
        whole = cls()
        for part in parts:
            for name in NAMES:
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return whole

    @classmethod
    def parse(cls, told: Mapping[str, object]) -> Self:
        """Create totals from ``told``, a dictionary that ``dataclasses.asdict`` made of other
        totals. Raises ValueError, TypeError."""
        return cls(**{name: float(told[name]) for name in NAMES if name in told})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class RouterTraffic:
    """The report of one router process."""

    beat: int
    """Number of the report. A router whose number does not change has stopped reporting."""
    counts: TrafficCounts


NAMES = tuple(field.name for field in fields(TrafficCounts))


class TrafficMeter:
    """Counts the requests of a router, and the output tokens that they are expected to need.

    The length of an answer is known at its end. Until then a request counts with the mean length
    of recent answers of its context-length class. A shift between kinds of requests shows when
    they arrive, refused ones included. Owned by the router's event loop.
    """

    def __init__(self) -> None:
        self.counts = TrafficCounts()
        """The totals of this router. The recorder of each request also counts its TTFT and TPOT
        here."""
        self._lengths = defaultdict[str, RunningMean](partial(RunningMean, _WEIGHT))
        """Mean output tokens, by context-length class."""

    def came(self, context_class: str, prompt_tokens: int, max_tokens: int) -> None:
        """Count a request that has just arrived, and that may have up to ``max_tokens`` output
        tokens."""
        self.counts.requests += 1
        self.counts.input_tokens += prompt_tokens
        mean = self._lengths[context_class].value
        guess = min(FIRST_ANSWER_TOKENS, max_tokens)
        self.counts.expected_tokens += guess if mean is None else mean

    def ended(self, context_class: str, tokens: int) -> None:
        """Update the mean answer length of a context-length class with an answer that ended without
        an error."""
        self._lengths[context_class].add(float(tokens))


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Traffic of all routers between two looks."""

    seconds: float
    """Length of the window, in seconds."""
    counts: TrafficCounts


@dataclass(slots=True)
class _Router:
    told: RouterTraffic
    heard_at: float


class TrafficTracker:
    """Computes the traffic between two looks at the routers' reports.

    A router that was started since the last look counts from the next look on. While a router has
    not reported for ``SILENT_S``, its load is unknown and there is no result, until it reports
    again or was silent for ``GONE_S``. Times are seconds of any one clock.
    """

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}
        self._looked_at: float | None = None

    def look(self, told: Mapping[str, RouterTraffic], now: float) -> TrafficWindow | None:
        """Return the traffic since the last look; None while it is unknown. ``told`` has the latest
        report of each router."""
        added = []
        for name, one in told.items():
            known = self._routers.get(name)
            if known is None:
                self._routers[name] = _Router(one, now)
                continue
            if one.beat != known.told.beat:
                known.heard_at = now
            added.append(one.counts.since(known.told.counts))
            known.told = one
        for name in self._routers.keys() - told.keys():
            # A router that leaves removes its report.
            del self._routers[name]
        before, self._looked_at = self._looked_at, now
        if before is None or now <= before or not added or self._silent(now):
            return None
        return TrafficWindow(now - before, TrafficCounts.total(added))

    def gone(self, now: float) -> list[str]:
        """Return the names of routers that have not reported for ``GONE_S``."""
        return [name for name, one in self._routers.items() if now - one.heard_at >= GONE_S]

    def _silent(self, now: float) -> bool:
        return any(now - one.heard_at >= SILENT_S for one in self._routers.values())
