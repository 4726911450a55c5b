"""When batches run, and how fast, so that they end in their windows. Pure functions.

A batch runs at full speed, in the slack of other traffic, within ``batch_hours``. Outside of them
it waits if the hours before its deadline suffice for it and for the batches of its tenant that are
due earlier. If they do not, it runs outside of them too, evenly, at the share of the full speed
that makes up for what is missing.

Work is counted in seconds of the slack: tokens of the lines that have no result, by the mean of
those that have one, over the measured tokens per second. Tenants share the slack by weight.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.config.daily_hours import DailyHours, seconds_of

MARGIN = 1.25
"""Factor of the predicted time: the slack at a later hour is not known."""
MIN_LINES = 8
"""Lines with a result from which the tokens of the others are estimated."""

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a batch has left to do."""

    id: str
    tenant: str
    expires_at: float
    """Unix seconds at which its window ends."""
    total: int
    """Lines of its file."""
    done: int
    """Lines that have a result."""
    tokens: int
    """Tokens of prompts and answers of these."""

    @property
    def left(self) -> int:
        """Lines that have no result."""
        return max(0, self.total - self.done)

    @property
    def tokens_per_line(self) -> float | None:
        """The mean; None while too few lines have a result."""
        if self.done < min(MIN_LINES, self.total):
            return None
        return self.tokens / max(1, self.done)


class SpeedState(enum.StrEnum):
    """How a batch is run at this moment."""

    FULL_SPEED = "full_speed"
    PACED = "paced"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """What is planned for a batch. Times are Unix seconds."""

    state: SpeedState
    lines_per_s: float
    """Lines that may begin per second: infinite at full speed, 0 while the batch waits."""
    starts_at: float | None = None
    """When a batch that waits goes on."""
    ends_at: float | None = None
    """Estimate of its end, the end of the window at the latest; None: not known yet."""
    late_lines: int = 0
    """Estimate of the lines that have no answer when the window ends."""


def plan_batches(
    works: Iterable[BatchWork],
    tokens_per_s: float | None,
    hours: DailyHours | None,
    weights: Mapping[str, float],
    now: float,
) -> dict[str, BatchSchedule]:
    """Plan all batches; returns the schedule of each by id.

    ``tokens_per_s`` is the measured speed of all batches together at full speed; None while it is
    not known. ``hours`` None is the whole day. ``weights`` are those of tenants, 1 for others.

    A batch of unknown size or speed runs at full speed: its first lines show how long it takes.
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
    """Plan the batches of a tenant, which has ``share`` of the slack; those due first come first.

    ``total_s``: seconds of the work of all tenants.
    """
    schedules: dict[str, BatchSchedule] = {}
    ahead_s = speed = 0.0
    for work in works:
        own_s = _work_s(work, tokens_per_s)
        if own_s is None:
            schedules[work.id] = BatchSchedule(SpeedState.FULL_SPEED, math.inf)
            continue
        ahead_s += own_s
        # Others may have less work than their share of the slack.
        work_s = min(ahead_s / share, total_s)
        missing = _missing_share(MARGIN * work_s, spans, now, work.expires_at)
        # What the batches before it do outside of the hours counts for it too.
        extra, speed = max(0.0, missing - speed), max(speed, missing)
        done_s, end = _progress(work_s, speed, spans, now, work.expires_at)
        late = min(1.0, (work_s - done_s) / max(own_s * work_s / ahead_s, 1e-9)) if own_s else 0.0
        # A remainder of rounding is no line.
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
    """Seconds of the whole slack that the rest of a batch takes; None: not known."""
    per_line = work.tokens_per_line
    if per_line is None or not tokens_per_s:
        return None
    return work.left * per_line / tokens_per_s


def _spans(hours: DailyHours | None, now: float, end: float) -> Spans:
    return [(now, end)] if hours is None else hours.spans(now, end)


def _missing_share(need_s: float, spans: Spans, now: float, end: float) -> float:
    """The share of full speed outside of the hours that ``need_s`` takes beyond them; at most 1."""
    inside_s = seconds_of(spans, end)
    outside_s = max(0.0, end - now - inside_s)
    if need_s <= inside_s:
        return 0.0
    return min(1.0, (need_s - inside_s) / outside_s) if outside_s > 0 else 1.0


def _progress(
    work_s: float, speed: float, spans: Spans, now: float, end: float
) -> tuple[float, float]:
    """Seconds of ``work_s`` that are done by ``end``, and when all of it is, ``end`` at the latest.

    ``speed`` is that outside of ``spans``, as a share of the full speed.
    """
    done, at = 0.0, now
    for first, last in (*spans, (end, end)):
        for until, rate in ((min(first, end), speed), (min(last, end), 1.0)):
            gain = max(0.0, until - at) * rate
            if done + gain >= work_s:
                return work_s, at if not rate else at + (work_s - done) / rate
            done, at = done + gain, max(at, until)
    return done, max(now, end)
