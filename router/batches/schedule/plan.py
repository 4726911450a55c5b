"""Decides when batches run, and how fast, so that they end in their windows. Pure functions.

Within ``batch_hours`` a batch runs at full speed, in the slack: the capacity that other traffic
leaves. Outside of them it waits, if the hours before its deadline suffice for it and for the
batches of its tenant that are due earlier. Otherwise it also runs outside of them, evenly, at the
fraction of the full speed that makes up for the missing time.

Work is measured in seconds of the slack. It is the tokens of the lines without a result, estimated
by the mean of the others, divided by the measured tokens per second. Tenants share the slack by
weight.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.config.daily_hours import DailyHours, seconds_of

MARGIN = 1.25
"""Safety factor by which the predicted remaining time of a batch is multiplied, because the slack
of later hours is not known."""
MIN_LINES = 8
"""Minimum number of finished lines from which the tokens of the other lines are estimated."""

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class BatchWork:
    """The remaining work of a batch."""

    id: str
    tenant: str
    expires_at: float
    """End of the batch's completion window, in Unix seconds."""
    total: int
    """Number of lines of the batch's input file."""
    done: int
    """Number of lines with a result."""
    tokens: int
    """Prompt and answer tokens of the finished lines."""

    @property
    def left(self) -> int:
        """Number of lines of the batch without a result."""
        return max(0, self.total - self.done)

    @property
    def tokens_per_line(self) -> float | None:
        """Mean tokens per line; None while too few lines have a result."""
        if self.done < min(MIN_LINES, self.total):
            return None
        return self.tokens / max(1, self.done)


class SpeedState(enum.StrEnum):
    """How a batch currently runs."""

    FULL_SPEED = "full_speed"
    PACED = "paced"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The plan for a batch. Times are Unix seconds."""

    state: SpeedState
    lines_per_s: float
    """Number of lines that may begin per second: infinite at full speed, 0 while the batch
    waits."""
    starts_at: float | None = None
    """Time at which a waiting batch continues; None if the batch does not wait."""
    ends_at: float | None = None
    """Estimated end of the batch, at most the end of its window; None: the end is not known yet."""
    late_lines: int = 0
    """Estimated number of lines without an answer when the window ends."""


def plan_batches(
    works: Iterable[BatchWork],
    tokens_per_s: float | None,
    hours: DailyHours | None,
    weights: Mapping[str, float],
    now: float,
) -> dict[str, BatchSchedule]:
    """Plan all batches; return the schedule of each by id.

    ``tokens_per_s`` is the measured speed of all batches together at full speed; None while it is
    not known. ``hours`` None means the whole day. ``weights`` gives the weights of tenants; a
    tenant that is not in it has weight 1. A batch of unknown size or speed runs at full speed: its
    first lines show how long it takes.
    """
    by_tenant: dict[str, list[BatchWork]] = defaultdict(list)
    for work in sorted(works, key=lambda one: (one.expires_at, one.id)):
        by_tenant[work.tenant].append(work)
    all_works = [work for own in by_tenant.values() for work in own]
    latest = max((work.expires_at for work in all_works), default=now)
    spans = _spans(hours, now, max(now, latest))
    total_s = sum(_work_s(work, tokens_per_s) or 0.0 for work in all_works)
    total_weight = sum(weights.get(tenant, 1.0) for tenant in by_tenant)
    next_begin = now if hours is None else hours.next_begin(now)
    schedules: dict[str, BatchSchedule] = {}
    for tenant, own in by_tenant.items():
        share = weights.get(tenant, 1.0) / total_weight
        schedules |= _plan_tenant(own, tokens_per_s, spans, share, total_s, next_begin, now)
    return schedules


def _plan_tenant(
    works: Sequence[BatchWork],
    tokens_per_s: float | None,
    spans: Spans,
    share: float,
    total_s: float,
    next_begin: float,
    now: float,
) -> dict[str, BatchSchedule]:
    """Plan the batches of a tenant that gets the fraction ``share`` of the slack; batches with the
    earliest deadlines come first.

    ``total_s``: work of all tenants, in seconds of the slack.
    """
    schedules: dict[str, BatchSchedule] = {}
    ahead_s = speed = 0.0
    for work in works:
        own_s = _work_s(work, tokens_per_s)
        if own_s is None:
            schedules[work.id] = BatchSchedule(SpeedState.FULL_SPEED, math.inf)
            continue
        ahead_s += own_s
        # Other tenants may have less work than their share of the slack.
        work_s = min(ahead_s / share, total_s)
        missing = _missing_share(MARGIN * work_s, spans, now, work.expires_at)
        # The work of earlier batches outside of the hours counts for this one too.
        extra, speed = max(0.0, missing - speed), max(speed, missing)
        done_s, end = _progress(work_s, speed, spans, now, work.expires_at)
        late = min(1.0, (work_s - done_s) / max(own_s * work_s / ahead_s, 1e-9)) if own_s else 0.0
        # Ignore rounding errors.
        late_lines = math.ceil(late * work.left - 1e-6)
        if next_begin <= now or extra >= 1.0 or not work.left:
            state, lines_per_s, starts_at = SpeedState.FULL_SPEED, math.inf, None
        elif extra > 0.0:
            rate = extra * work.left / max(own_s, 1e-9)
            state, lines_per_s, starts_at = SpeedState.PACED, rate, None
        else:
            state, lines_per_s, starts_at = SpeedState.WAITING, 0.0, next_begin
        schedules[work.id] = BatchSchedule(state, lines_per_s, starts_at, end, late_lines)
    return schedules


def _work_s(work: BatchWork, tokens_per_s: float | None) -> float | None:
    """Return how many seconds the rest of a batch takes with the whole slack; None: not known."""
    per_line = work.tokens_per_line
    if per_line is None or not tokens_per_s:
        return None
    return work.left * per_line / tokens_per_s


def _spans(hours: DailyHours | None, now: float, end: float) -> Spans:
    return [(now, end)] if hours is None else hours.spans(now, end)


def _missing_share(need_s: float, spans: Spans, now: float, end: float) -> float:
    """Return the fraction of the full speed, at most 1, at which a batch must run outside of
    ``spans`` so that work of ``need_s`` seconds is done by ``end``."""
    inside_s = seconds_of(spans, end)
    outside_s = max(0.0, end - now - inside_s)
    if need_s <= inside_s:
        return 0.0
    return min(1.0, (need_s - inside_s) / outside_s) if outside_s > 0 else 1.0


def _progress(
    work_s: float, speed: float, spans: Spans, now: float, end: float
) -> tuple[float, float]:
    """Return how much of the work ``work_s`` is done by ``end``, in seconds of work, and the time
    at which all of the work is done, at most ``end``.

    Work runs at full speed within ``spans``. Outside of ``spans`` it runs at the fraction ``speed``
    of full speed.
    """
    done, at = 0.0, now
    for first, last in (*spans, (end, end)):
        for until, rate in ((min(first, end), speed), (min(last, end), 1.0)):
            gain = max(0.0, until - at) * rate
            if done + gain >= work_s:
                return work_s, at if not rate else at + (work_s - done) / rate
            done, at = done + gain, max(at, until)
    return done, max(now, end)
