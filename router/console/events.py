"""The console's log of events: what happened to workers, requests and files, found by comparing
consecutive looks at the cluster. No clock; ``at`` is in Unix seconds.

What happens and is undone between two looks has no event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from baton.security.tls import Renewal, TlsFiles
from baton.store.registry import DRAINING
from baton.store.supervision import SupervisionReport
from router.console.rates import Key
from router.console.snapshot import Observation, ObservedWorker

KEPT = 512
"""Maximum number of events in the log. The oldest are forgotten first."""
MAX_WORKERS = 8
"""Maximum number of workers that have an event of their own if the same happens to several at the
same look. More become one event."""
MOVES_S = 5.0
"""Minimum time between two events about requests that moved for the same reason, in seconds."""
DOWN_LOOKS = 2
"""Consecutive looks at which a worker takes no requests before that is an event. A worker whose
call has failed rests for a moment."""

Kind = Literal[
    "joined",
    "left",
    "died",
    "draining",
    "ready",
    "role",
    "unreachable",
    "moved",
    "breaker",
    "store",
    "health",
    "autoscaler",
    "keys",
    "certificate",
]
Level = Literal["info", "warning", "error"]
_MOVED = {
    "decode_failed": "their decode worker failed",
    "decode_silent": "their decode worker was silent",
    "decode_stalled": "their decode worker computed nothing",
    "prefill_failed": "their prefill worker failed",
    "prefill_silent": "their prefill worker was silent",
    "prefill_stalled": "their prefill worker computed nothing",
    "handoff_failed": "their handoff failed",
    "preempted": "their decode worker had no room",
    "drained": "their worker drains",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    number: int
    """Position of the event among all events of this router process, from 1."""
    at: float
    kind: Kind
    level: Level
    text: str


class EventLog:
    """The latest ``KEPT`` events."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)
        self.last = 0
        """Number of the latest event; 0 before the first one."""

    def add(self, at: float, kind: Kind, text: str, level: Level = "info") -> None:
        """Add an event at the end of the log."""
        self.last += 1
        self._events.append(Event(self.last, at, kind, level, text))

    def since(self, number: int) -> list[Event]:
        """Return the events that are kept and have a higher number than ``number``."""
        return [one for one in self._events if one.number > number]


@dataclass(slots=True)
class _Worker:
    """A worker as it was at the last look."""

    slot: str
    role: str
    state: str
    was_up: bool = False
    """Whether the worker ever took requests."""
    down_looks: int = 0


@dataclass(slots=True)
class _Moves:
    """Requests that moved for one reason and have no event yet."""

    count: float = 0.0
    told_at: float = float("-inf")


@dataclass(slots=True)
class _Seen:
    """What the last look has seen."""

    health: str
    counts: Mapping[Key, float]
    workers: dict[str, _Worker] = field(default_factory=dict)


class ClusterWatch:
    """Finds the events between consecutive looks, and adds them to a log."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._seen: _Seen | None = None
        self._moves: dict[str, _Moves] = {}
        self._deaths: dict[str, int] = {}
        self._decided_at = float("-inf")
        self._store_failures = 0.0
        """Calls of the store that have failed since it last answered all of them."""
        self._has_report = False

    def look(
        self,
        look: Observation,
        report: SupervisionReport | None,
        files: Iterable[tuple[Level, str]],
    ) -> None:
        """Compare a look with the one before. ``report`` is the supervisor's status, if it is
        known. ``files`` has what ``CertificateWatch`` has found."""
        if report is not None:
            self._supervision(look.at, report)
        for level, text in files:
            self._log.add(look.at, "certificate", text, level)
        if self._seen is None:
            count = len(look.workers)
            self._log.add(
                look.at, "health", f"the log begins: {count} workers, {_health(look)}", "info"
            )
            workers = {one.record.incarnation: _worker(one) for one in look.workers}
            self._seen = _Seen(_health(look), look.counts, workers)
            return
        self._workers(look, self._seen)
        self._counts(look, self._seen.counts)
        self._store(look, self._seen.counts)
        health = _health(look)
        if health != self._seen.health:
            self._log.add(
                look.at, "health", f"the cluster is {health}", _LEVELS.get(look.health, "error")
            )
        self._seen.health, self._seen.counts = health, look.counts

    def _workers(self, look: Observation, seen: _Seen) -> None:
        listed = {one.record.incarnation: one for one in look.workers}
        found: dict[_Change, list[str]] = {}
        for name in seen.workers.keys() - listed.keys():
            gone = seen.workers.pop(name)
            found.setdefault(_LEFT if gone.state == DRAINING else _GONE, []).append(gone.slot)
        for name, one in listed.items():
            if (before := seen.workers.get(name)) is None:
                seen.workers[name] = _worker(one)
                changes = [_Change("joined", "info", f"joins as a {one.record.role} worker")]
            else:
                changes = _changes(before, one)
            for change in changes:
                found.setdefault(change, []).append(one.record.slot)
        for change, slots in found.items():
            for line in _lines(sorted(slots), change.what):
                self._log.add(look.at, change.kind, line, change.level)

    def _store(self, look: Observation, before: Mapping[Key, float]) -> None:
        key: Key = ("redis_failures",)
        new = look.counts.get(key, 0.0) - before.get(key, 0.0)
        if new > 0 and not self._store_failures:
            text = "the store does not answer: requests go on, with what the router knows"
            self._log.add(look.at, "store", text, "warning")
        elif new <= 0 and self._store_failures:
            text = f"the store answers again: {self._store_failures:.0f} calls have failed"
            self._log.add(look.at, "store", text)
        self._store_failures = self._store_failures + new if new > 0 else 0.0

    def _counts(self, look: Observation, before: Mapping[Key, float]) -> None:
        for key, value in look.counts.items():
            new = value - before.get(key, 0.0)
            if new <= 0:
                continue
            if key[0] == "moved":
                self._moves.setdefault(key[1], _Moves()).count += new
            elif key[0] == "left_out":
                text = f"the circuit breaker of {key[1]} opens: its streams fail repeatedly"
                self._log.add(look.at, "breaker", text, "warning")
            elif key[0] == "readmitted":
                text = f"the circuit breaker of {key[1]} closes: it takes requests as before"
                self._log.add(look.at, "breaker", text)
            elif key[0] == "key_file_failures":
                text = "the file of API keys cannot be used: the previous keys stay valid"
                self._log.add(look.at, "keys", text, "error")
        for reason, moves in self._moves.items():
            if moves.count and look.at - moves.told_at >= MOVES_S:
                noun = "request moves" if moves.count == 1 else "requests move"
                text = f"{moves.count:.0f} {noun}: {_MOVED.get(reason, reason)}"
                level: Level = "info" if reason in ("drained", "preempted") else "warning"
                self._log.add(look.at, "moved", text, level)
                moves.count, moves.told_at = 0.0, look.at

    def _supervision(self, at: float, report: SupervisionReport) -> None:
        for slot, deaths in report.deaths.items():
            if self._has_report and deaths.count > self._deaths.get(slot, 0):
                often = f" ({deaths.count} times in a row)" if deaths.count > 1 else ""
                loop = ", in a crash loop" if deaths.is_crash_loop else ""
                why = f": {deaths.last_error}" if deaths.last_error else ""
                self._log.add(at, "died", f"{slot} has died{often}{loop}{why}", "error")
        self._deaths = {slot: deaths.count for slot, deaths in report.deaths.items()}
        self._has_report = True
        for one in report.decisions:
            if one.at > self._decided_at:
                self._decided_at = one.at
                self._log.add(one.at, "autoscaler", one.text)


class _Change(NamedTuple):
    """Something that may happen to several workers at once."""

    kind: Kind
    level: Level
    what: str


_LEFT = _Change("left", "info", "has left after its drain")
_GONE = _Change("left", "error", "is gone without a drain")


def _changes(before: _Worker, seen: ObservedWorker) -> list[_Change]:
    """Return what has changed about a worker, and update ``before``."""
    found: list[_Change] = []
    role, state = seen.record.role, seen.record.state
    if role != before.role:
        found.append(_Change("role", "info", f"is a {role} worker now"))
    if state != before.state and state == DRAINING:
        found.append(_Change("draining", "info", "drains"))
    if state != before.state and state == "ready":
        found.append(_Change("ready", "info", "takes requests again"))
    before.role, before.state = role, state
    was_told = before.down_looks >= DOWN_LOOKS
    before.was_up |= seen.is_up
    is_down = before.was_up and state == "ready" and not seen.is_up
    before.down_looks = before.down_looks + 1 if is_down else 0
    if before.down_looks == DOWN_LOOKS:
        found.append(_Change("unreachable", "warning", "takes no requests: it does not answer"))
    if was_told and seen.is_up:
        found.append(_Change("ready", "info", "answers again"))
    return found


_LEVELS: dict[str, Level] = {"ok": "info", "degraded": "warning"}
_HEALTH = {"ok": "healthy"}


def _health(look: Observation) -> str:
    told = _HEALTH.get(look.health, look.health)
    return f"{told}: {look.reason}" if look.reason else told


def _worker(seen: ObservedWorker) -> _Worker:
    return _Worker(seen.record.slot, seen.record.role, seen.record.state, seen.is_up)


def _lines(slots: Sequence[str], what: str) -> list[str]:
    if len(slots) <= MAX_WORKERS:
        return [f"{slot} {what}" for slot in slots]
    names = ", ".join(slots[:MAX_WORKERS])
    return [f"{len(slots)} workers, each {what}: {names}, …"]


class CertificateWatch:
    """Detects replaced certificate files, and files that cannot be used. Used by one thread at a
    time."""

    def __init__(self, files: Iterable[TlsFiles]) -> None:
        self._renewals = {one: Renewal(one) for one in files}

    def look(self) -> list[tuple[Level, str]]:
        """Read changed files. Return what is new about them, each with its level."""
        found: list[tuple[Level, str]] = []
        for files, renewal in self._renewals.items():
            before = renewal.problem
            if renewal.came():
                found.append(("info", f"{files.certificate} was replaced"))
            elif renewal.problem and renewal.problem != before:
                text = f"the previous certificate stays in use: {renewal.problem}"
                found.append(("error", text))
        return found
