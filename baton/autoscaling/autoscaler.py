"""Decides the roles and the number of workers from the traffic. Pure.

Each look takes the demand and the SLO figures, and returns actions:

1. ``baton.autoscaling.needs`` gives the workers that each role needs. More than it has is a
   shortage.
2. A role that is short gets a worker of the other role, if that role can spare it or if both
   benefit; otherwise another worker is started.
3. A worker that was not needed for a cooldown is drained, one at a time.

With a minimum of no prefill workers, the last one goes when decode workers can take its prompts.
One comes back when they are short, and the prompts use at least ``MIN_PROMPTS`` of a worker. The
last decode worker stays.

No change is reversed within a cooldown: a role that has grown does not shrink, and vice versa. A
change by an operator counts as one. A new autoscaler begins with a cooldown.

No I/O, no clock: ``now`` is in seconds of any one clock. Owned by the caller of ``decide``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.autoscaling.cluster_figures import (
    ROLES,
    ClusterFigures,
    WorkerFigures,
    WorkerState,
    other,
)
from baton.autoscaling.needs import Reason, RoleBalance, WorkerNeeds
from baton.config.autoscaler import AutoscalerConfig
from baton.config.choices import Role

HYSTERESIS = 0.15
"""Minimum relative gain of a change of roles. A role gives a worker to the other role only if its
own load then is at most 1 minus this, or if the higher load of the two roles falls by at least this
fraction."""
GROWTH_LOOKS = 2
"""Number of consecutive looks at which a role must be short of workers before one is started."""
MIN_PROMPTS = 0.5
"""Workers that prompts must need before the first prefill worker is started. Fewer prompts would
leave it idle for most of the time, and a decode worker is of more use."""


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """An action: one worker takes the other role (prefill or decode)."""

    slot: str
    role: Role
    """The role that the worker takes."""
    reason: Reason
    why: str
    """Reason for the action in words, for logs."""

    @property
    def name(self) -> str:
        """Name of the action in metrics."""
        return f"to_{self.role}"


@dataclass(frozen=True, slots=True)
class Resize:
    """An action: a pool starts one worker, or drains its worker with the highest number."""

    pool: str
    by: int
    """1 starts a worker in the pool; -1 drains one."""
    role: Role
    """The role that gains or loses the worker."""
    reason: Reason
    why: str

    @property
    def name(self) -> str:
        """Name of the action in metrics."""
        return "grow" if self.by > 0 else "shrink"


Action = ChangeRole | Resize


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits on the number of workers."""

    min_of: Mapping[Role, int]
    max_of: Mapping[Role, int]
    """Maximum workers of each role."""
    min_workers: int
    max_workers: int
    """Maximum workers of both roles together."""

    @classmethod
    def of(cls, config: AutoscalerConfig, configured: int) -> Bounds:
        """Return the bounds of a cluster that is configured with ``configured`` workers."""
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
    """1: the role grew; -1: it shrank; 0: another process or an operator changed it."""
    at: float


class Autoscaler:
    """Decides at each look at the cluster which actions to take."""

    def __init__(self, config: AutoscalerConfig, bounds: Bounds, pools: Mapping[Role, str]) -> None:
        """Create an autoscaler. ``pools`` names, for each role, the only pool whose workers start
        in that role."""
        self._config = config
        self._bounds = bounds
        self._pools = pools
        self._home: dict[str, Role] = {pool: role for role, pool in pools.items()}
        self._needs = WorkerNeeds(config)
        self._moved: dict[Role, _Move] = {}
        self._decided: list[_Move] = []
        """Changes of the roles' sizes that were decided at the last look."""
        self._changed_at: float | None = None
        """Time of the last change, by the autoscaler or by an operator."""
        self._slots: frozenset[str] = frozenset()
        self._roles: dict[str, Role] = {}
        """Role of each incarnation at the last look."""
        self.summary = "has not looked yet"
        """Result of the last look, in words."""
        self.needs: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        """Workers that each role needs, at the last look."""

    def decide(self, seen: ClusterFigures, now: float) -> tuple[Action, ...]:
        """Return the actions to take now. The caller must call ``acted`` once they are done or have
        failed."""
        self._notice_hands(seen.workers, now)
        if seen.demand is None:
            self.summary = "does nothing: some of the figures it needs are unknown"
            self._needs.skip()
            return ()
        balance = self._needs.look(seen.workers, seen.demand, now, rested=self._rested(now))
        self.needs = dict(balance.need)
        self.summary = balance.text()
        actions: list[Action] = (
            self._within_bounds(balance, now)
            or self._change_roles(balance, now)
            or self._grow(balance, now)
            or self._shrink(balance, now)
        )
        self._decided = []
        for action in actions:
            self._count_on(action, balance, now)
        return tuple(actions)

    def acted(self, now: float) -> None:
        """Start the cooldown after the last decisions were carried out or failed.

        A change that is not visible at the next look counts as reverted.
        """
        self._settle(now)
        for move in self._decided:
            move.at = now

    # Observing

    def _notice_hands(self, workers: Sequence[WorkerFigures], now: float) -> None:
        """Detect changes of roles or sizes that the autoscaler did not make."""
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
        """Start a cooldown at ``now``, and forget what was observed before the cluster changed."""
        self._changed_at = now
        self._needs.forget()

    def _count_on(self, action: Action, balance: RoleBalance, now: float) -> None:
        """Expect the effect of an action at the next look, so that the effect does not count as an
        operator's change."""
        self._settle(now)
        if isinstance(action, ChangeRole):
            moves = {action.role: _Move(1, now), other(action.role): _Move(-1, now)}
            turned = next(one for one in balance.workers if one.slot == action.slot)
            self._roles[turned.incarnation] = action.role
        else:
            moves = {action.role: _Move(action.by, now)}
            numbers = (one.number for one in balance.workers if one.pool == action.pool)
            last = max(numbers, default=-1)
            self._slots ^= {f"{action.pool}-{last + 1 if action.by > 0 else last}"}
        self._moved |= moves
        self._decided += moves.values()

    def _rested(self, now: float) -> bool:
        """Whether roles and pool sizes have not changed for a whole cooldown."""
        assert self._changed_at is not None, "it has looked"
        return now - self._changed_at >= self._config.cooldown_s

    def _may(self, role: Role, sign: int, now: float) -> bool:
        """Whether a role may gain (``sign`` 1) or lose (-1) a worker. It may if its last change had
        the same sign, or is at least a cooldown ago."""
        move = self._moved[role]
        return move.sign == sign or now - move.at >= self._config.cooldown_s

    # Acting

    def _within_bounds(self, balance: RoleBalance, now: float) -> list[Action]:
        """Return actions that restore the bounds after an operator's change or a failure."""
        why = f"outside of the bounds: {balance.text()}"
        return self._total_within(balance, why, now) or self._roles_within(balance, why, now)

    def _roles_within(self, balance: RoleBalance, why: str, now: float) -> list[Action]:
        """Return actions that bring the number of workers of each role within its bounds."""
        bounds = self._bounds
        for role in ROLES:
            giver = other(role)
            if balance.have[role] < bounds.min_of[role]:
                if balance.have[giver] > bounds.min_of[giver]:
                    return self._turn(balance, giver, 1, Reason.BOUNDS, why, now)
                if balance.total < bounds.max_workers:
                    return self._start(balance, role, Reason.BOUNDS, why, now)
            if balance.have[role] > bounds.max_of[role]:
                if balance.have[giver] < bounds.max_of[giver]:
                    return self._turn(balance, role, 1, Reason.BOUNDS, why, now)
                if balance.total > bounds.min_workers:
                    return self._drain(balance, role, Reason.BOUNDS, why, now)
        return []

    def _total_within(self, balance: RoleBalance, why: str, now: float) -> list[Action]:
        """Return actions that bring the total number of workers within its bounds."""
        bounds = self._bounds
        if balance.total > bounds.max_workers and self._rested(now):
            spare = [role for role in ROLES if balance.have[role] > bounds.min_of[role]]
            if spare:
                role = min(spare, key=lambda one: _load_without(balance, one))
                return self._drain(balance, role, Reason.BOUNDS, why, now)
        if balance.total < bounds.min_workers:
            free = [role for role in ROLES if balance.have[role] < bounds.max_of[role]]
            if free:
                return self._start(balance, max(free, key=balance.load), Reason.BOUNDS, why, now)
        return []

    def _change_roles(self, balance: RoleBalance, now: float) -> list[Action]:
        """Return actions that move workers from the less loaded role to the one with a shortage."""
        taker = balance.busier()
        giver, most = other(taker), max(1, balance.have[other(taker)] // 2)
        trial = RoleBalance(balance.workers, dict(balance.have), balance.need, balance.floor)
        count = 0
        while count < most and self._gains(trial, taker):
            trial.have[giver] -= 1
            trial.have[taker] += 1
            count += 1
        reason = self._needs.reason(taker)
        return self._turn(balance, giver, count, reason, balance.text(), now)

    def _gains(self, balance: RoleBalance, taker: Role) -> bool:
        """Whether a worker of the other role would be of more use in the role ``taker``."""
        giver, bounds, band = other(taker), self._bounds, 1 - HYSTERESIS
        if balance.load(taker) <= 1 or balance.have[taker] >= bounds.max_of[taker]:
            return False
        if balance.have[giver] <= bounds.min_of[giver]:
            return False
        has = balance.floor[taker] / balance.have[taker] if balance.have[taker] else math.inf
        if balance.have[giver] == 1:
            # Its prompts become those of the decode workers.
            return sum(balance.floor.values()) / (balance.have[taker] + 1) <= band * has
        if balance.need[giver] / (balance.have[giver] - 1) <= band:
            return True
        # A role that is short itself gives a worker only for measured demand, not for a correction.
        given = balance.floor[giver] / (balance.have[giver] - 1)
        taken = balance.floor[taker] / (balance.have[taker] + 1)
        return max(given, taken) <= band * has

    def _grow(self, balance: RoleBalance, now: float) -> list[Action]:
        """Return the action that starts a worker in a role that stays short of workers and cannot
        get one from the other role."""
        role = short = balance.busier()
        is_short = balance.load(role) > 1 and self._needs.short_looks(role) >= GROWTH_LOOKS
        if not is_short or self._gains(balance, role):
            return []
        if not balance.have["prefill"] and balance.prompts >= MIN_PROMPTS:
            role = "prefill"
        if (
            balance.total >= self._bounds.max_workers
            or balance.have[role] >= self._bounds.max_of[role]
        ):
            return []
        reason = self._needs.reason(short)
        return self._start(balance, role, reason, balance.text(), now)

    def _shrink(self, balance: RoleBalance, now: float) -> list[Action]:
        """Return the action that drains one worker, if no role needed that worker for a
        cooldown."""
        if not self._rested(now) or balance.total <= self._bounds.min_workers:
            return []
        broken = [role for role in ROLES if self._has_broken(balance, role)]
        if broken and max(map(balance.load, ROLES)) <= 1:
            return self._drain(balance, broken[0], Reason.SURPLUS, balance.text(), now)
        spare = [role for role in ROLES if self._is_spare(balance, role)]
        if not spare:
            return []
        role = min(spare, key=lambda one: _load_without(balance, one))
        return self._drain(balance, role, Reason.SURPLUS, balance.text(), now)

    def _has_broken(self, balance: RoleBalance, role: Role) -> bool:
        """Whether the worker with the highest number in the role's pool, which is drained first,
        fails to start."""
        places = _places(balance, self._pools[role])
        return len(places) > 1 and places[-1].state is WorkerState.FAILED

    def _is_spare(self, balance: RoleBalance, role: Role) -> bool:
        """Whether a role could have run with one worker less at all looks of a cooldown."""
        if balance.have[role] <= self._bounds.min_of[role]:
            return False
        if balance.have[role] == 1:
            # Decode workers would compute the prompts.
            needed, decode = sum(map(self._needs.max_need, ROLES)), balance.have["decode"]
            return decode > 0 and needed <= (1 - HYSTERESIS) * decode
        return self._needs.max_need(role) / (balance.have[role] - 1) <= 1 - HYSTERESIS

    def _turn(
        self, balance: RoleBalance, giver: Role, count: int, reason: Reason, why: str, now: float
    ) -> list[Action]:
        """Return the actions by which ``count`` workers leave the role ``giver``: first those of
        the other role's pool, then the least loaded."""
        taker = other(giver)
        if not (self._may(giver, -1, now) and self._may(taker, 1, now)):
            return []
        serving = balance.in_role(giver, WorkerState.SERVING)
        serving.sort(key=lambda one: (self._home[one.pool] == giver, one.sequences, one.slot))
        # Starting workers may be slow, so one serving worker stays unless none is needed.
        count = min(count, len(serving) - min(1, self._bounds.min_of[giver]))
        return [ChangeRole(one.slot, taker, reason, why) for one in serving[: max(0, count)]]

    def _start(
        self, balance: RoleBalance, role: Role, reason: Reason, why: str, now: float
    ) -> list[Action]:
        """Return the action that starts one worker of ``role``; none while another one is
        starting."""
        if not self._may(role, 1, now) or balance.in_role(role, WorkerState.STARTING):
            return []
        return [Resize(self._pools[role], 1, role, reason, why)]

    def _drain(
        self, balance: RoleBalance, role: Role, reason: Reason, why: str, now: float
    ) -> list[Action]:
        """Return the action that drains the highest slot of a pool, if a worker of ``role`` is in
        that slot.

        If no pool has such a slot, a worker of ``role`` takes the other role instead, so that a
        later look can drain a highest slot.
        """
        if not self._may(role, -1, now):
            return []
        for pool in self._pools.values():
            places = _places(balance, pool)
            least = min(1, self._bounds.min_of[self._home[pool]])
            if len(places) > least and self._can_go(balance, places[-1], role):
                return [Resize(pool, -1, role, reason, why)]
        if balance.have[other(role)] < self._bounds.max_of[other(role)]:
            return self._turn(balance, role, 1, reason, f"so that another can go: {why}", now)
        return []

    def _can_go(self, balance: RoleBalance, worker: WorkerFigures, role: Role) -> bool:
        """Whether the role can lose this worker. A role must keep its last worker that serves,
        unless its minimum is 0."""
        if worker.state is not WorkerState.SERVING:
            return worker.role == role or worker.state is WorkerState.FAILED
        left = len(balance.in_role(role, WorkerState.SERVING)) - 1
        return worker.role == role and left >= min(1, self._bounds.min_of[role])


def _places(balance: RoleBalance, pool: str) -> list[WorkerFigures]:
    """Return the figures of a pool's slots, sorted by slot number."""
    own = [one for one in balance.workers if one.pool == pool]
    return sorted(own, key=lambda one: one.number)


def _load_without(balance: RoleBalance, role: Role) -> float:
    """Return the load that a role would have with one worker less. That of decode workers, if it
    was the last prefill worker."""
    left = balance.have[role] - 1
    if left > 0:
        return balance.need[role] / left
    decode = balance.have["decode"] if role == "prefill" else 0
    return sum(balance.need.values()) / decode if decode else math.inf
