"""The budgets of keys and tenants, as one router process sees them.

    asked ─Redis answers→ held until the bill, or refused
    asked ─Redis does not answer→ taken from this router's slice, or refused

With each answer of Redis, a router holds a slice of the budget, at most 1 % of it, for ``SLICE_S``.
It may spend the slice while Redis is unavailable, and then refuses further requests. So a budget is
never exceeded. Amounts taken from a slice are billed when Redis is available again.
"""

from __future__ import annotations

import datetime
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config.access import KeyConfig, TenantConfig
from baton.config.choices import BudgetPeriod
from baton.config.cluster import Config
from baton.config.money import Budgeted, dollars_text, nanodollars
from baton.errors import Unavailable
from baton.telemetry.metrics import RouterMetrics
from router.billing.budget_scripts import KEYS_OF_A_BUDGET

log = logging.getLogger(__name__)

SLICE_S = 300.0
"""Time for which a router may spend its slice after the last answer of Redis, in seconds."""
_SLICE_SHARE = 100
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of a key or of a tenant."""

    kind: str
    """Whose budget this is: that of a ``key`` or a ``tenant``."""
    name: str
    limit: int
    """Maximum cost per period of the budget, in nanodollars."""
    warn_at: int
    slow_at: int
    """Spent nanodollars from which the requests of the key or tenant run in the background. If this
    equals the limit, they never do."""
    every: BudgetPeriod

    @classmethod
    def of(cls, kind: str, owner: KeyConfig | TenantConfig) -> Budget | None:
        """Create the budget of a key or a tenant; None if its configuration sets none."""
        settings: Budgeted = owner
        limit = nanodollars(settings.budget)
        if not limit:
            return None
        warn, slow = settings.budget_warn_ratio, settings.budget_slow_ratio
        thresholds = round(limit * warn), round(limit * slow)
        return cls(kind, owner.name, limit, *thresholds, settings.budget_period)

    @property
    def slice(self) -> int:
        """Maximum amount of this budget, in nanodollars, that one router may spend while Redis is
        unavailable."""
        return self.limit // _SLICE_SHARE

    def period(self, now: float) -> str:
        """Return the name of the budget's period at a Unix time: ``2026-11-23``, ``2026-11``,
        ``total``."""
        if self.every == "total":
            return "total"
        return f"{_utc(now):{'%Y-%m-%d' if self.every == 'day' else '%Y-%m'}}"

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the budget's next period; None if there is no next one."""
        if self.every == "total":
            return None
        at = _utc(now)
        midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
        if self.every == "day":
            ends = midnight + datetime.timedelta(days=1)
        else:
            # 31 days after the first of a month is always in the next one.
            ends = (midnight.replace(day=1) + datetime.timedelta(days=31)).replace(day=1)
        return (ends - at).total_seconds()

    def state(self, used: int) -> str:
        """Return the state of the budget when ``used`` nanodollars are used: ``ok``, ``warned``,
        ``slowed`` or ``stopped``."""
        if used >= self.limit:
            return "stopped"
        if used >= self.slow_at:
            return "slowed"
        return "warned" if used >= self.warn_at else "ok"

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of the budget in Redis."""
        name = f"{prefix}:budget:{self.kind}:{self.name}:{self.every}"
        return [f"{name}:{part}" for part in KEYS_OF_A_BUDGET]

    def __str__(self) -> str:
        return f"the budget of {self.kind} {self.name!r}"


@dataclass(slots=True)
class Hold:
    """The amounts of budgets that a request holds from its admission until its bill is written."""

    entry: str
    """Unique name of the request, under which Redis keeps the amounts that it holds."""
    budgets: tuple[Budget, ...] = ()
    periods: tuple[str, ...] = ()
    """For each of ``budgets``, the period in which the request was admitted, and to which its cost
    counts."""
    amount: int = 0
    """Nanodollars that the request holds of each budget."""
    from_slices: bool = False
    """Whether the request holds parts of this router's slices, because Redis did not answer."""
    slow: bool = False
    """Whether a budget is used up so far that the request runs in the background."""


@dataclass(slots=True)
class _Slice:
    amount: int = 0
    """Size of the slice: the nanodollars of the budget that Redis holds for this router."""
    until: float = float("-inf")
    unreported: int = 0
    """Nanodollars of the slice that requests took while Redis did not answer, and that are not
    billed in Redis yet."""


class Budgets:
    """The budgets of all keys and tenants, as one router process sees them. Owned by the router's
    event loop."""

    def __init__(
        self,
        config: Config,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        found = (Budget.of("tenant", tenant) for tenant in config.tenants)
        self._of_tenants = {one.name: one for one in found if one is not None}
        self._metrics = metrics
        self._clock = clock
        self._unix_clock = unix_clock
        self._slices: dict[tuple[str, str], _Slice] = {}
        self._warned: dict[tuple[str, str], str] = {}
        self.holder = f"router-{secrets.token_hex(6)}"
        """Name under which Redis keeps this process's slices of budgets, next to the amounts that
        requests hold."""

    def of(self, key: KeyConfig) -> tuple[Budget, ...]:
        """Return the budgets that a request of an API key counts against: those of the key and of
        its tenant."""
        found = (Budget.of("key", key), self._of_tenants.get(key.tenant))
        return tuple(one for one in found if one is not None)

    def of_tenants(self) -> Sequence[Budget]:
        """Return the budgets of all tenants."""
        return tuple(self._of_tenants.values())

    def period(self, budget: Budget) -> str:
        """Return the current period of a budget."""
        return budget.period(self._unix_clock())

    def seconds_left(self, budget: Budget) -> float | None:
        """Return the seconds until the next period of a budget; None if there is no next one."""
        return budget.seconds_left(self._unix_clock())

    def arguments(self, budget: Budget) -> tuple[int | str, ...]:
        """Return the arguments that describe a budget to the script that charges requests."""
        unreported = self._slice(budget).unreported
        return budget.limit, self.period(budget), budget.slice, unreported

    def learn(self, budget: Budget, used: int, held: int, asked_at: float) -> None:
        """Apply what Redis answered about a budget to a call made at the monotonic time
        ``asked_at``.

        ``used``: nanodollars of the budget that are spent or held. ``held``: size of this router's
        slice, in nanodollars.
        """
        mine = self._slice(budget)
        mine.amount, mine.until = held, asked_at + SLICE_S
        if budget.kind == "tenant":
            ratio = used / budget.limit
            self._metrics.budget_used_ratio.labels(budget.name).set(ratio)
        period = self.period(budget)
        place = budget.kind, budget.name
        if used >= budget.warn_at and self._warned.get(place) != period:
            self._warned[place] = period
            log.warning(
                "%s for %s is used up to %d %%: $%s of $%s",
                budget,
                period,
                100 * used // budget.limit,
                dollars_text(used),
                dollars_text(budget.limit),
            )

    def hold(self, hold: Hold, cost: int) -> None:
        """Record that Redis has granted a request's ``hold`` the amount ``cost`` of each of the
        hold's budgets."""
        hold.amount, hold.from_slices = cost, False
        hold.periods = tuple(map(self.period, hold.budgets))

    def hold_of_slices(self, hold: Hold, cost: int) -> None:
        """Hold the amount ``cost`` on this router's slices of the budgets, because Redis does not
        answer.

        Raises Unavailable.
        """
        for budget in hold.budgets:
            mine = self._slice(budget)
            if self._clock() >= mine.until or mine.unreported + cost > mine.amount:
                raise Unavailable(
                    f"{budget} cannot be checked, because Redis does not answer, and this router"
                    " has used up the part that it may spend without Redis: try again later",
                    retry_after=_RETRY_S,
                )
        self.hold(hold, cost)
        hold.from_slices = True
        self.correct(hold.budgets, cost)

    def correct(self, budgets: Sequence[Budget], amount: int) -> None:
        """Add ``amount`` to what requests have taken from this router's slices of ``budgets``, in
        nanodollars. It is negative if a bill is lower than the amount held, or has reached
        Redis."""
        for budget in budgets:
            self._slice(budget).unreported += amount

    def _slice(self, budget: Budget) -> _Slice:
        return self._slices.setdefault((budget.kind, budget.name), _Slice())


def _utc(now: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(now, datetime.UTC)
