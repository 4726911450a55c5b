"""One run: a cluster, a load, and one round of faults after the other.

A round: wait for streams on those who are to be struck; strike; heal when the time has come; wait
until the cluster is whole; let the load pause, and look for what has leaked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from signal import SIGABRT

from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.faults.faults import FAULTS
from tests.chaos.faults.kinds import Kind, Target
from tests.chaos.faults.launcher_faults import LaunchersAway
from tests.chaos.faults.operator_faults import WorkerDrained
from tests.chaos.harness.cluster import ROLES, Cluster, is_alive
from tests.chaos.harness.counters import by_label
from tests.chaos.harness.footprint import Footprint, footprint, leaks
from tests.chaos.harness.recovery import MAX_S, until_answered, until_streams_run, until_whole
from tests.chaos.harness.victim import NobodyToStrike, Victim, find_victim, is_busy
from tests.chaos.load.ledger import Ending, Ledger, Phase
from tests.chaos.load.load import Load
from tests.chaos.load.questions import Question
from tests.chaos.load.reference import Reference, ask_undisturbed
from tests.chaos.report import Report, RoundReport
from tests.chaos.schedule import Round, Strike, rounds

_CLIENTS = 3
_SETTLE_S = 3.0
"""Of load before the first fault."""
_BETWEEN_S = 1.0
"""Of load before the next fault."""

_TRIES = 10
ROUNDS_A_MINUTE = 3.0
"""Fewer than these are too few to say anything; a machine with nothing else to do has eight."""
_CHANGE_S = 120.0
"""Time in which all workers are replaced by those of another model and back, on a busy machine."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Struck:
    """A fault that is ready, or has begun."""

    strike: Strike
    victim: Victim
    fault: Fault

    @property
    def target(self) -> Target:
        """The processes that it may hit."""
        return self.strike.kind.target


@dataclass(frozen=True, slots=True)
class _Recovery:
    """Seconds; see ``RoundReport``."""

    streams_s: float
    answered_s: float
    whole_s: float


@dataclass(slots=True)
class Run:
    """``kinds``: the faults that may come. ``asked``: what the clients ask, with ``reference``."""

    cluster: Cluster
    seed: int
    kinds: Sequence[Kind]
    asked: Sequence[Question]
    reference: Reference
    ledger: Ledger = field(default_factory=Ledger)
    reports: list[RoundReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)
    """Leaks that were reported."""
    _pids: dict[str, int] = field(default_factory=dict)
    """Of workers and routers by name, when the last round ended."""
    _told: int = 0
    """Requests in trouble that were reported."""

    async def go(self, minutes: float, max_rounds: int | None = None) -> Report:
        """Until the time is over, or for a number of rounds. Raises ``WrongBeforeFaults``.

        The report is of a failure where fewer rounds came than these, or than the time is for.
        """
        fronts, asked, reference = self.cluster.fronts, self.asked, self.reference
        await ask_undisturbed(fronts, asked, reference)
        load = Load(fronts, asked, reference, self.ledger, seed=self.seed, clients=_CLIENTS)
        first = await footprint(self.cluster)
        self._pids = self.cluster.pids()
        load.start()
        try:
            await self._without_faults(load, first)
            await self._rounds(load, first, minutes, max_rounds)
            await load.pause()
        finally:
            await load.stop()
        return await self._report(minutes, max_rounds)

    async def _without_faults(self, load: Load, first: Footprint) -> None:
        """A while of load alone; it is a round only if something is found after it."""
        await asyncio.sleep(_SETTLE_S)
        load.check()
        await load.pause()
        now = time.monotonic()
        whole_s = await until_whole(self.cluster, now, healed_at=now)
        found = await self._found(first, ())
        load.resume()
        if found:
            self._note((), _Recovery(0.0, 0.0, whole_s), found)

    async def _rounds(
        self, load: Load, first: Footprint, minutes: float, max_rounds: int | None
    ) -> None:
        until = time.monotonic() + 60 * minutes
        planned: Iterator[Round] = rounds(self.seed, self.kinds)
        while time.monotonic() < until and len(self.reports) != max_rounds:
            await asyncio.sleep(_BETWEEN_S)
            load.check()
            try:
                await self._round(next(planned), load, first)
            except NobodyToStrike as error:
                # The cluster stays broken: report what was found so far, and this with it.
                self._note((), _Recovery(0.0, 0.0, MAX_S), [f"the run ended early: {error}"])
                return

    async def _round(self, planned: Round, load: Load, first: Footprint) -> None:
        struck = await self._choose(planned, load)
        if not struck:
            return
        before = time.monotonic()
        for one in struck:
            await one.fault.strike()
        # To strike may take a while: what came meanwhile came before.
        began = time.monotonic()
        has_spare = all(one.strike.kind.has_spare for one in struck)
        healing = asyncio.gather(*(self._heal(one, began) for one in struck))
        if any(one.strike.kind.is_standstill for one in struck):
            await healing
            since = time.monotonic()
        else:
            since = began
        feeling = asyncio.gather(until_streams_run(load, since), until_answered(load, since))
        await healing
        # Nothing heals without a launcher, and a rollout takes its time; all else heals from the
        # fault on.
        kinds_now = [one.strike.kind for one in struck]
        waits = any(one.needs_launchers or one.needs_plain_workers for one in kinds_now)
        healed_at = time.monotonic() if waits else since
        faults = [one.fault for one in struck]
        whole_s = await until_whole(self.cluster, since, faults, healed_at=healed_at)
        streams_s, answered_s = await feeling
        kinds = tuple(one.strike.kind.name for one in struck)
        may_reset = any(one.strike.kind.may_reset for one in struck)
        self.ledger.phases.append(
            Phase(kinds, before, time.monotonic(), began, has_spare, may_reset)
        )
        stuck = await self._end_what_hangs() if math.isinf(whole_s) else []
        await load.pause()
        found = stuck + await self._found(first, struck)
        drained = await self._drained_blocks(struck)
        load.resume()
        self._note(struck, _Recovery(streams_s, answered_s, whole_s), found, drained)

    async def _choose(self, planned: Round, load: Load) -> list[_Struck]:
        """Faults that are ready, of victims with running streams. Raises NobodyToStrike."""
        for _ in range(_TRIES):
            chosen = [
                one for strike in planned.strikes if (one := await self._prepare(strike, load))
            ]
            if all([await is_busy(self.cluster, load, one.target, one.victim) for one in chosen]):
                return chosen
            for one in chosen:
                await one.fault.drop()
        raise NobodyToStrike(f"{planned}: whoever was chosen had nothing to do by then")

    async def _prepare(self, strike: Strike, load: Load) -> _Struck | None:
        """None where this machine does not let it."""
        victim = await find_victim(self.cluster, load, strike.kind.target, strike.pick)
        fault = FAULTS[strike.kind.name](self.cluster, victim)
        try:
            await fault.prepare()
        except CannotStrike as error:
            self.skipped[strike.kind.name] = str(error)
            return None
        return _Struck(strike, victim, fault)

    async def _heal(self, one: _Struck, began: float) -> None:
        await asyncio.sleep(max(0.0, began + one.strike.seconds - time.monotonic()))
        await one.fault.heal()

    async def _end_what_hangs(self) -> list[str]:
        """Workers that live and are not back: they write down what they do, and end (SIGABRT).

        The run goes on with the cluster that comes of it.
        """
        serving = {worker.slot for worker in await self.cluster.workers()}
        found = [f"cluster: not whole after {MAX_S:.0f} s; there are {', '.join(sorted(serving))}"]
        for name, pid in self.cluster.pids().items():
            if name.startswith(ROLES) and name not in serving and is_alive(pid):
                found.append(f"{name}: process {pid} lives, and is not back")
                self.cluster.signal(pid, SIGABRT)
        now = time.monotonic()
        await until_whole(self.cluster, now, healed_at=now)
        self._pids = self.cluster.pids()
        return found

    async def _found(self, first: Footprint, struck: Sequence[_Struck]) -> list[str]:
        """Leaks of the cluster that were not reported yet; processes that have ended."""
        found = [line for line in await leaks(self.cluster, first) if line not in self._known]
        self._known.update(found)
        complaints = [line for one in struck for line in one.fault.complaints]
        return found + complaints + self._restarted(struck)

    async def _drained_blocks(self, struck: Sequence[_Struck]) -> int | None:
        drains = [one.fault for one in struck if isinstance(one.fault, WorkerDrained)]
        return sum([await fault.pulled() for fault in drains]) if drains else None

    def _restarted(self, struck: Sequence[_Struck]) -> list[str]:
        """Processes that ended since the last call without a fault that ends them."""
        allowed = {
            name for one in struck if one.strike.kind.may_restart for name in one.fault.names
        }
        before, self._pids = self._pids, self.cluster.pids()
        return [
            f"{name}: process {pid} has ended unasked"
            for name, pid in before.items()
            if self._pids.get(name) != pid and name not in allowed
        ]

    def _note(
        self,
        struck: Sequence[_Struck],
        recovery: _Recovery,
        found: Sequence[str],
        drained_blocks: int | None = None,
    ) -> None:
        report = RoundReport(
            kinds=tuple(one.strike.kind.name for one in struck),
            victims=tuple(one.victim.name for one in struck),
            streams=sum(one.victim.streams for one in struck),
            seconds=max((one.strike.seconds for one in struck), default=0.0),
            streams_s=round(recovery.streams_s, 3),
            answered_s=round(recovery.answered_s, 3),
            whole_s=MAX_S if math.isinf(recovery.whole_s) else round(recovery.whole_s, 3),
            leaks=tuple(found),
            drained_blocks=drained_blocks,
            takeover_s=next((s for one in struck if (s := _takeover_s(one.fault))), None),
        )
        self.reports.append(report)
        log.info("%s", report)
        for trouble in self.ledger.troubles()[self._told :]:
            log.info("%s", _line(trouble))
        self._told = len(self.ledger.troubles())

    async def _report(self, minutes: float, max_rounds: int | None) -> Report:
        rounds = max_rounds or min_rounds(minutes, self.kinds)
        return Report(
            seed=self.seed,
            minutes=minutes,
            min_rounds=rounds,
            min_kinds=min(rounds, len(self.kinds)),
            counts=self.ledger.counts(),
            rounds=tuple(self.reports),
            skipped=self.skipped,
            notes=tuple(map(_line, self.ledger.troubles())),
            moves=await by_label(self.cluster, "baton_moved_requests_total", "reason"),
            decisions=await by_label(self.cluster, "baton_route_decisions_total", "decision"),
        )


def min_rounds(minutes: float, kinds: Sequence[Kind]) -> int:
    """How many rounds a run of these kinds must have had after so long.

    A round without a launcher lasts for as long as it is away, and longer by a usual round. One
    that changes the model replaces all workers twice.
    """
    away_s = max((kind.max_s for kind in kinds if kind.needs_launchers), default=0.0)
    change_s = max((_CHANGE_S for kind in kinds if kind.needs_plain_workers), default=0.0)
    return max(1, int(60 * minutes / (60 / ROUNDS_A_MINUTE + away_s + change_s)))


def _takeover_s(fault: Fault) -> float | None:
    return round(fault.takeover_s, 3) if isinstance(fault, LaunchersAway) else None


def _line(ending: Ending) -> str:
    what = "wrong tokens" if ending.is_wrong else "lost" if ending.lost else ""
    what = what or ("error" if ending.error else "reset")
    why = ending.lost or ending.error or "ended well"
    took = ending.ended - ending.began
    return (
        f"{what}: {ending.question!r} over {ending.way}: {why}: {ending.text[:200]}"
        f" after {took:.1f} s and {ending.answer.token_count} tokens"
    )
