"""Decides which role workers play and how many there are, as the traffic asks for. Pure.

At each look it is told what came, what that costs and how the SLOs were kept, and says what to do:

1. *Floors*: the rate of tokens, a moment ahead, over what one worker can do gives the workers that
   each role needs. More than it has is a shortage.
2. *Corrections*: where a role has what it needs and misses its SLO all the same, it needs one more
   than it has; once its SLO has been kept with ease for a while, one less again.
3. A role that is short gets a worker of the other role, where that one can do without it, or where
   both fare better so; only where neither is so another worker is started.
4. What nobody needed for a cooldown is drained, one worker at a time.

Nothing is taken back within a cooldown: a role that has grown does not shrink, and the other way
round. What somebody else has changed counts as a change of its own. It begins with a cooldown, so
that one that was started anew looks first.

No I/O, no clock: ``now`` is in seconds of any one clock. Owned by whoever looks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.autoscaling.cluster_figures import (
    ROLES,
    ClusterFigures,
    Demand,
    SloFigures,
    WorkerFigures,
    WorkerState,
    other,
)
from baton.autoscaling.rate_forecast import RateForecast
from baton.config.autoscaler import AutoscalerConfig
from baton.config.choices import Role

MEMORY_LOOKS = 1.5
"""Rates are remembered for so many looks."""
GROWTH_LOOKS = 2
"""A shortage is seen so often before a worker is started for it."""
MIN_JUDGED = 10
"""Requests that an SLO is judged by."""
MIN_TOKENS_PER_S = 0.1
"""Less is no traffic."""
HYSTERESIS = 0.15
"""A role gives a worker away only if its load stays below 1 minus this, or if the higher load of
the two roles falls by at least this fraction."""
SLO_SHARE = 0.95
"""Fraction of requests that must meet each SLO; below it, a role gets one more worker."""


class Reason(StrEnum):
    """Why something is done, for metrics."""

    FORECAST = "forecast"
    """The rate of tokens asks for it."""
    TTFT = "ttft"
    """The time to the first token is too long."""
    TPOT = "tpot"
    """The time per output token is too long."""
    SURPLUS = "surplus"
    """There are more workers than are needed."""
    BOUNDS = "bounds"
    """There are more or fewer than there may be."""


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """One worker comes back in the other role."""

    slot: str
    role: Role
    """That it is to play."""
    reason: Reason
    why: str
    """In words."""

    @property
    def name(self) -> str:
        """For metrics."""
        return f"to_{self.role}"


@dataclass(frozen=True, slots=True)
class Resize:
    """One worker is started in a pool, or the one with the highest number is drained."""

    pool: str
    by: int
    """1 or -1."""
    role: Role
    """Which has a worker more or less then."""
    reason: Reason
    why: str

    @property
    def name(self) -> str:
        """For metrics."""
        return "grow" if self.by > 0 else "shrink"


Action = ChangeRole | Resize


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between which it moves."""

    least: Mapping[Role, int]
    most: Mapping[Role, int]
    """Workers of each role."""
    min_workers: int
    max_workers: int
    """Of both together."""

    @classmethod
    def of(cls, config: AutoscalerConfig, configured: int) -> Bounds:
        """Of a cluster with so many workers by its configuration."""
        return cls(
            {"prefill": config.min_prefill, "decode": config.min_decode},
            {
                "prefill": config.max_prefill or config.max_workers or configured,
                "decode": config.max_decode or config.max_workers or configured,
            },
            config.min_workers or configured,
            config.max_workers or configured,
        )


@dataclass(slots=True)
class _Move:
    """The last change of a role's number of workers."""

    sign: int
    """0: somebody else's."""
    at: float


@dataclass(slots=True)
class _Crew:
    """Who is there, with what was decided at this look."""

    workers: Sequence[WorkerFigures]
    have: dict[Role, int]
    """Workers that serve, or will."""
    need: dict[Role, float]
    """Workers that the traffic asks for, with what corrections add to the floor."""
    floor: dict[Role, float]
    """By the rates of tokens alone."""

    @property
    def total(self) -> int:
        """Places that are taken, those of workers that do not come up too."""
        return len(self.workers)

    def load(self, role: Role) -> float:
        """1: as much as its workers are planned to do."""
        if self.have[role]:
            return self.need[role] / self.have[role]
        return math.inf if self.need[role] else 0.0

    def busier(self) -> Role:
        """The role with the higher load."""
        return max(ROLES, key=self.load)

    def in_role(self, role: Role, *states: WorkerState) -> list[WorkerFigures]:
        """Workers of a role in one of these states."""
        return [one for one in self.workers if one.role == role and one.state in states]

    def text(self) -> str:
        """For people."""
        return "; ".join(
            f"{role} has {self.have[role]} and needs {self.need[role]:.1f}" for role in ROLES
        )


class Autoscaler:
    """See the module's text."""

    def __init__(self, config: AutoscalerConfig, bounds: Bounds, pools: Mapping[Role, str]) -> None:
        """``pools``: the one pool whose workers begin in each role."""
        self._config = config
        self._bounds = bounds
        self._pools = pools
        self._home: dict[str, Role] = {pool: role for role, pool in pools.items()}
        memory_s = MEMORY_LOOKS * config.interval_s
        self._input = RateForecast(memory_s)
        self._output = RateForecast(memory_s)
        self._extra: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        """Workers that corrections ask for, beyond what rates do."""
        self._missed_at: dict[Role, float] = {}
        """When its SLO was last not kept with ease."""
        self._blamed: dict[Role, Reason] = dict.fromkeys(ROLES, Reason.FORECAST)
        self._judged: deque[tuple[float, SloFigures, SloFigures]] = deque()
        self._needed: deque[tuple[float, dict[Role, float]]] = deque()
        self._short_looks: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._moved: dict[Role, _Move] = {}
        self._decided: list[_Move] = []
        """At the last look."""
        self._changed_at: float | None = None
        """When anything was last changed, by anybody."""
        self._slots: frozenset[str] = frozenset()
        self._roles: dict[str, Role] = {}
        """Of each incarnation."""
        self.summary = "has not looked yet"
        """What it saw last, in words."""
        self.needs: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        """Workers that each role needs, as it saw last."""

    def decide(self, seen: ClusterFigures, now: float) -> tuple[Action, ...]:
        """What to do now. ``acted`` is to be called once it was done, or could not be."""
        self._notice_hands(seen.workers, now)
        if seen.demand is None:
            self.summary = "does nothing: what it would act on is not known"
            self._short_looks = dict.fromkeys(ROLES, 0)
            return ()
        crew = self._crew(seen.workers, seen.demand, now)
        actions: list[Action] = (
            self._within_bounds(crew, now)
            or self._change_roles(crew, now)
            or self._grow(crew, now)
            or self._shrink(crew, now)
        )
        self._decided = []
        for action in actions:
            self._count_on(action, crew, now)
        return tuple(actions)

    def acted(self, now: float) -> None:
        """What was decided last was carried out, or could not be: the cooldown begins.

        Where it is not seen at the next look, somebody has taken it back.
        """
        self._settle(now)
        for move in self._decided:
            move.at = now

    # What it learns

    def _notice_hands(self, workers: Sequence[WorkerFigures], now: float) -> None:
        """See whether somebody else has changed roles or sizes since the last look."""
        slots = frozenset(one.slot for one in workers)
        roles = {one.incarnation: one.role for one in workers if one.incarnation}
        known = self._roles
        turned = any(known.get(name, role) != role for name, role in roles.items())
        if self._changed_at is None or slots != self._slots or turned:
            self._settle(now)
            self._moved = {role: _Move(0, now) for role in ROLES}
        self._slots = slots
        self._roles = {**{name: known[name] for name in known if name in roles}, **roles}

    def _settle(self, now: float) -> None:
        """What was seen until now was of another cluster."""
        self._changed_at = now
        self._judged.clear()
        self._needed.clear()

    def _count_on(self, action: Action, crew: _Crew, now: float) -> None:
        """It will be so: nobody else has done it, and it is not to be taken back."""
        self._settle(now)
        if isinstance(action, ChangeRole):
            moves = {action.role: _Move(1, now), other(action.role): _Move(-1, now)}
            turned = next(one for one in crew.workers if one.slot == action.slot)
            self._roles[turned.incarnation] = action.role
        else:
            moves = {action.role: _Move(action.by, now)}
            last = max(one.number for one in crew.workers if one.pool == action.pool)
            self._slots ^= {f"{action.pool}-{last + 1 if action.by > 0 else last}"}
        self._moved |= moves
        self._decided += moves.values()

    def _crew(self, workers: Sequence[WorkerFigures], demand: Demand, now: float) -> _Crew:
        """Who is there, and how many are needed."""
        crew = _Crew(workers, {}, {}, {})
        for role in ROLES:
            helping = crew.in_role(role, WorkerState.SERVING, WorkerState.STARTING)
            crew.have[role] = len(helping)
        crew.floor = self._floors(demand, crew.have)
        crew.need = dict(crew.floor)
        self._correct(crew, demand, now)
        for role in ROLES:
            crew.need[role] += self._extra[role]
        self._needed.append((now, dict(crew.need)))
        while self._needed[0][0] < now - self._config.cooldown_s:
            self._needed.popleft()
        for role in ROLES:
            self._short_looks[role] = self._short_looks[role] + 1 if crew.load(role) > 1 else 0
        self.needs = dict(crew.need)
        self.summary = crew.text()
        return crew

    def _floors(self, demand: Demand, have: Mapping[Role, int]) -> dict[Role, float]:
        """Workers by the rates of tokens; what a role has, where its pace is not known."""
        config = self._config
        self._input.add(demand.input_tokens_per_s, demand.seconds)
        self._output.add(demand.output_tokens_per_s, demand.seconds)
        prompts, answers = (rate.ahead(config.interval_s) for rate in (self._input, self._output))
        need: dict[Role, float] = {role: float(have[role]) for role in ROLES}
        if max(prompts, answers) < MIN_TOKENS_PER_S and not demand.decode_sequences:
            return dict.fromkeys(ROLES, 0.0)
        if demand.prefill_s_per_token is not None:
            need["prefill"] = prompts * demand.prefill_s_per_token / config.target_load
        if demand.decode_tokens_per_s:
            by_tokens = answers / demand.decode_tokens_per_s
            # What has gathered beyond the SLO's batches is not seen in the tokens: they come slow.
            by_sequences = demand.decode_sequences / demand.decode_batch
            need["decode"] = max(by_tokens, by_sequences) / config.target_load
        return need

    def _correct(self, crew: _Crew, demand: Demand, now: float) -> None:
        """One more where an SLO is missed though nothing is short, and one less later."""
        self._judged.append((now, demand.ttft, demand.tpot))
        while self._judged[0][0] < now - self._config.cooldown_s:
            self._judged.popleft()
        ttft = _total([one for _, one, _ in self._judged])
        tpot = _total([one for _, _, one in self._judged])
        for reason, figures in ((Reason.TTFT, ttft), (Reason.TPOT, tpot)):
            role = self._to_blame(reason, crew)
            if self._beyond(figures.tight, figures.judged):
                self._missed_at[role] = now
            if not self._beyond(figures.missed, figures.judged) or not self._rested(now):
                continue
            if crew.load(role) <= 1:
                self._extra[role] = crew.have[role] + 1 - crew.need[role]
                self._blamed[role] = reason
        for role in ROLES:
            eased_s = now - self._missed_at.get(role, -math.inf)
            if self._extra[role] and eased_s >= self._config.cooldown_s:
                self._extra[role] = max(0.0, self._extra[role] - 1)
                self._missed_at[role] = now

    def _to_blame(self, reason: Reason, crew: _Crew) -> Role:
        """Whose shortage makes an SLO be missed: first tokens wait for places to decode, too."""
        if reason is Reason.TPOT:
            return "decode"
        is_decode = crew.load("decode") > max(1.0, crew.load("prefill"))
        return "decode" if is_decode else "prefill"

    def _beyond(self, count: float, judged: float) -> bool:
        """Whether more requests than may are among those that were judged."""
        return judged >= MIN_JUDGED and count > (1 - SLO_SHARE) * judged

    def _rested(self, now: float) -> bool:
        """Whether nothing was changed for a cooldown."""
        assert self._changed_at is not None, "it has looked"
        return now - self._changed_at >= self._config.cooldown_s

    def _may(self, role: Role, sign: int, now: float) -> bool:
        """Whether a role may gain or lose a worker, as far as what it did before goes."""
        move = self._moved[role]
        return move.sign == sign or now - move.at >= self._config.cooldown_s

    # What it does

    def _within_bounds(self, crew: _Crew, now: float) -> list[Action]:
        """Bring back what somebody, or a failure, has brought out of the bounds."""
        why = f"outside of the bounds: {crew.text()}"
        return self._total_within(crew, why, now) or self._roles_within(crew, why, now)

    def _roles_within(self, crew: _Crew, why: str, now: float) -> list[Action]:
        """No role has more than it may have, or fewer."""
        bounds = self._bounds
        for role in ROLES:
            giver = other(role)
            if crew.have[role] < bounds.least[role]:
                if crew.have[giver] > bounds.least[giver]:
                    return self._turn(crew, giver, 1, Reason.BOUNDS, why, now)
                if crew.total < bounds.max_workers:
                    return self._start(crew, role, Reason.BOUNDS, why, now)
            if crew.have[role] > bounds.most[role]:
                if crew.have[giver] < bounds.most[giver]:
                    return self._turn(crew, role, 1, Reason.BOUNDS, why, now)
                if crew.total > bounds.min_workers:
                    return self._drain(crew, role, Reason.BOUNDS, why, now)
        return []

    def _total_within(self, crew: _Crew, why: str, now: float) -> list[Action]:
        """There are no more workers than there may be, and no fewer."""
        bounds = self._bounds
        if crew.total > bounds.max_workers and self._rested(now):
            spare = [role for role in ROLES if crew.have[role] > bounds.least[role]]
            if spare:
                role = min(spare, key=lambda one: _load_without(crew, one))
                return self._drain(crew, role, Reason.BOUNDS, why, now)
        if crew.total < bounds.min_workers:
            free = [role for role in ROLES if crew.have[role] < bounds.most[role]]
            if free:
                return self._start(crew, max(free, key=crew.load), Reason.BOUNDS, why, now)
        return []

    def _change_roles(self, crew: _Crew, now: float) -> list[Action]:
        """Workers of the role that has more than it needs go to the one that has less."""
        taker = crew.busier()
        giver, most = other(taker), max(1, crew.have[other(taker)] // 2)
        trial = _Crew(crew.workers, dict(crew.have), crew.need, crew.floor)
        count = 0
        while count < most and self._gains(trial, taker):
            trial.have[giver] -= 1
            trial.have[taker] += 1
            count += 1
        reason = self._blamed[taker] if self._extra[taker] else Reason.FORECAST
        return self._turn(crew, giver, count, reason, crew.text(), now)

    def _gains(self, crew: _Crew, taker: Role) -> bool:
        """Whether a worker of the other role is better used in this one."""
        giver, bounds, band = other(taker), self._bounds, 1 - HYSTERESIS
        if crew.load(taker) <= 1 or crew.have[taker] >= bounds.most[taker]:
            return False
        if crew.have[giver] <= max(1, bounds.least[giver]):
            return False
        if crew.need[giver] / (crew.have[giver] - 1) <= band:
            return True
        # A role that is short itself gives only for what is known to be asked for.
        given = crew.floor[giver] / (crew.have[giver] - 1)
        taken = crew.floor[taker] / (crew.have[taker] + 1)
        has = crew.floor[taker] / crew.have[taker] if crew.have[taker] else math.inf
        return max(given, taken) <= band * has

    def _grow(self, crew: _Crew, now: float) -> list[Action]:
        """Start a worker where a role stays short, and no other one can be had."""
        role = crew.busier()
        is_short = crew.load(role) > 1 and self._short_looks[role] >= GROWTH_LOOKS
        if not is_short or self._gains(crew, role):
            return []
        if crew.total >= self._bounds.max_workers or crew.have[role] >= self._bounds.most[role]:
            return []
        reason = self._blamed[role] if self._extra[role] else Reason.FORECAST
        return self._start(crew, role, reason, crew.text(), now)

    def _shrink(self, crew: _Crew, now: float) -> list[Action]:
        """Drain a worker that nobody has needed for a cooldown."""
        if not self._rested(now) or crew.total <= self._bounds.min_workers:
            return []
        broken = [role for role in ROLES if self._has_broken(crew, role)]
        if broken and max(map(crew.load, ROLES)) <= 1:
            return self._drain(crew, broken[0], Reason.SURPLUS, crew.text(), now)
        spare = [role for role in ROLES if self._is_spare(crew, role)]
        if not spare:
            return []
        role = min(spare, key=lambda one: _load_without(crew, one))
        return self._drain(crew, role, Reason.SURPLUS, crew.text(), now)

    def _has_broken(self, crew: _Crew, role: Role) -> bool:
        """Whether the worker that the role's pool would lose does not come up."""
        places = _places(crew, self._pools[role])
        return len(places) > 1 and places[-1].state is WorkerState.FAILED

    def _is_spare(self, crew: _Crew, role: Role) -> bool:
        """Whether a role could have done with a worker less, at all looks of a cooldown."""
        if crew.have[role] <= max(1, self._bounds.least[role]):
            return False
        most = max(need[role] for _, need in self._needed)
        return most / (crew.have[role] - 1) <= 1 - HYSTERESIS

    def _turn(
        self, crew: _Crew, giver: Role, count: int, reason: Reason, why: str, now: float
    ) -> list[Action]:
        """Change the role of so many workers: of those with the least to do, guests first."""
        taker = other(giver)
        if not (self._may(giver, -1, now) and self._may(taker, 1, now)):
            return []
        serving = crew.in_role(giver, WorkerState.SERVING)
        serving.sort(key=lambda one: (self._home[one.pool] == giver, one.sequences, one.slot))
        # Whatever is about to come up, somebody is to serve meanwhile.
        count = min(count, len(serving) - 1)
        return [ChangeRole(one.slot, taker, reason, why) for one in serving[: max(0, count)]]

    def _start(self, crew: _Crew, role: Role, reason: Reason, why: str, now: float) -> list[Action]:
        """One at a time: the next once that one has come up."""
        if not self._may(role, 1, now) or crew.in_role(role, WorkerState.STARTING):
            return []
        return [Resize(self._pools[role], 1, role, reason, why)]

    def _drain(self, crew: _Crew, role: Role, reason: Reason, why: str, now: float) -> list[Action]:
        """A pool loses its highest slot: of the pool in which a worker of the role is there.

        Where there is none, a worker of the role takes the other one, whose highest can go then.
        """
        if not self._may(role, -1, now):
            return []
        for pool in self._pools.values():
            places = _places(crew, pool)
            if len(places) > 1 and _can_go(crew, places[-1], role):
                return [Resize(pool, -1, role, reason, why)]
        if crew.have[other(role)] < self._bounds.most[other(role)]:
            return self._turn(crew, role, 1, reason, f"so that another can go: {why}", now)
        return []


def _places(crew: _Crew, pool: str) -> list[WorkerFigures]:
    """A pool's slots, by their numbers."""
    own = [one for one in crew.workers if one.pool == pool]
    return sorted(own, key=lambda one: one.number)


def _load_without(crew: _Crew, role: Role) -> float:
    """A role's load with a worker less."""
    left = crew.have[role] - 1
    return crew.need[role] / left if left > 0 else math.inf


def _can_go(crew: _Crew, worker: WorkerFigures, role: Role) -> bool:
    """Whether a role has a worker less without it, or nobody has; the last that serves stays."""
    if worker.state is not WorkerState.SERVING:
        return worker.role == role or worker.state is WorkerState.FAILED
    return worker.role == role and len(crew.in_role(role, WorkerState.SERVING)) > 1


def _total(parts: Sequence[SloFigures]) -> SloFigures:
    return SloFigures(
        sum(one.judged for one in parts),
        sum(one.missed for one in parts),
        sum(one.tight for one in parts),
    )
