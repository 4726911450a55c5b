"""Computes how many workers of each role the traffic needs. Pure.

The forecast token rate divided by the capacity of one worker gives a floor. Where a role has its
floor and still misses its SLO, a correction adds one worker. The correction shrinks after the SLO
was met with ease for a cooldown.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.autoscaling.cluster_figures import (
    ROLES,
    Demand,
    SloFigures,
    WorkerFigures,
    WorkerState,
)
from baton.config.autoscaler import AutoscalerConfig
from baton.config.choices import Role

MEMORY_LOOKS = 1.5
"""Time constant with which the forecasts of token rates forget earlier readings, in looks."""
MIN_JUDGED = 10
"""Minimum number of requests for judging an SLO."""
SLO_SHARE = 0.95
"""Fraction of requests that must meet each SLO; below it, a role gets one more worker."""
MIN_TOKENS_PER_S = 0.1
"""Minimum rate that counts as traffic, in tokens per second."""
_TREND_WEIGHT = 0.5
"""Weight of the trend relative to the level. A rate that jumps is then overestimated by at most a
sixth, for a few readings."""


class Reason(StrEnum):
    """Why an action is taken; the values are metric labels."""

    FORECAST = "forecast"
    """The forecast token rate requires the action."""
    TTFT = "ttft"
    """Too many requests miss the SLO for the time to first token."""
    TPOT = "tpot"
    """Too many requests miss the SLO for the time per output token."""
    SURPLUS = "surplus"
    """There are more workers than the traffic needs."""
    BOUNDS = "bounds"
    """The number of workers is outside of the configured bounds."""


@dataclass(slots=True)
class RoleBalance:
    """The workers at one look, and how many of each role the traffic needs."""

    workers: Sequence[WorkerFigures]
    have: dict[Role, int]
    """Workers that serve or start, by role."""
    need: dict[Role, float]
    """Workers that the traffic needs, by role: the floor plus corrections."""
    floor: dict[Role, float]
    """Workers that the forecast token rates need, by role, without corrections. Without prefill
    workers, the decode workers' floor includes the prompts."""
    prompts: float = 0.0
    """Workers that the forecast rate of prompt tokens needs, whatever their role."""

    @property
    def total(self) -> int:
        """Number of slots in use, including those of failed workers."""
        return len(self.workers)

    def load(self, role: Role) -> float:
        """Return a role's load: the workers that it needs divided by those that it has. 1 is the
        planned load."""
        if self.have[role]:
            return self.need[role] / self.have[role]
        return math.inf if self.need[role] else 0.0

    def busier(self) -> Role:
        """Return the role with the higher load."""
        return max(ROLES, key=self.load)

    def in_role(self, role: Role, *states: WorkerState) -> list[WorkerFigures]:
        """Return the workers of a role in one of these states."""
        return [one for one in self.workers if one.role == role and one.state in states]

    def text(self) -> str:
        """Describe for logs how many workers each role has and needs."""
        return "; ".join(
            f"{role} has {self.have[role]} and needs {self.need[role]:.1f}" for role in ROLES
        )


class RateForecast:
    """Forecasts a rate from its level and its trend, per second.

    Double exponential smoothing (C. C. Holt, "Forecasting seasonals and trends by exponentially
    weighted moving averages", 1957; International Journal of Forecasting 20, 2004) with a damped
    trend (E. S. Gardner and E. McKenzie, "Forecasting trends in time series", Management Science
    31, 1985), so that a rate that jumps is not expected to rise on. Readings may be unevenly
    spaced.
    """

    def __init__(self, memory_s: float) -> None:
        """Create a forecast. A reading that is ``memory_s`` old has a weight of 1/e. The trend is
        damped at the same rate."""
        self._memory_s = memory_s
        self._level: float | None = None
        self._trend = 0.0
        """Trend of the rate: the change of its level per second."""

    def add(self, rate: float, seconds: float) -> None:
        """Add the rate observed over the last ``seconds``."""
        if self._level is None:
            self._level = rate
            return
        kept = math.exp(-seconds / self._memory_s)
        before, expected = self._level, self._level + self._risen(seconds)
        self._level = max(0.0, expected + (1 - kept) * (rate - expected))
        weight = _TREND_WEIGHT * (1 - kept)
        self._trend += weight * ((self._level - before) / seconds - self._trend)

    def ahead(self, seconds: float) -> float:
        """Return the rate expected ``seconds`` from now, at least 0.

        A fall is not forecast, since too few workers cost more than too many.
        """
        if self._level is None:
            return 0.0
        return max(0.0, self._level, self._level + self._risen(seconds))

    def _risen(self, seconds: float) -> float:
        """Return by how much the damped trend changes the rate within ``seconds``."""
        memory_s = self._memory_s
        return self._trend * memory_s * (1 - math.exp(-seconds / memory_s))


class WorkerNeeds:
    """Computes the workers that each role needs, look by look. Owned by the autoscaler."""

    def __init__(self, config: AutoscalerConfig) -> None:
        self._config = config
        memory_s = MEMORY_LOOKS * config.interval_s
        self._input = RateForecast(memory_s)
        self._output = RateForecast(memory_s)
        self._extra: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        """Number of workers that corrections for missed SLOs add to the floor, by role."""
        self._missed_at: dict[Role, float] = {}
        """By role: when its SLO was last not met with ease, or a correction of its need was last
        reduced."""
        self._blamed: dict[Role, Reason] = dict.fromkeys(ROLES, Reason.FORECAST)
        self._judged: deque[tuple[float, SloFigures, SloFigures]] = deque()
        self._needed: deque[tuple[float, dict[Role, float]]] = deque()
        self._short_looks: dict[Role, int] = dict.fromkeys(ROLES, 0)

    def look(
        self, workers: Sequence[WorkerFigures], demand: Demand, now: float, *, rested: bool
    ) -> RoleBalance:
        """Return the workers, and how many of them each role needs. ``rested``: true if roles and
        pool sizes have not changed for a cooldown."""
        balance = RoleBalance(workers, {}, {}, {})
        for role in ROLES:
            helping = balance.in_role(role, WorkerState.SERVING, WorkerState.STARTING)
            balance.have[role] = len(helping)
        balance.floor = self._floors(demand, balance.have)
        balance.prompts = balance.floor["prefill"]
        if not self._has_prefill(balance):
            # Decode workers compute the prompts.
            balance.floor["decode"] += balance.prompts
            balance.floor["prefill"] = 0.0
        balance.need = dict(balance.floor)
        self._correct(balance, demand, now, rested=rested)
        for role in ROLES:
            balance.need[role] += self._extra[role]
        self._needed.append((now, dict(balance.need)))
        while self._needed[0][0] < now - self._config.cooldown_s:
            self._needed.popleft()
        for role in ROLES:
            self._short_looks[role] = self._short_looks[role] + 1 if balance.load(role) > 1 else 0
        return balance

    def skip(self) -> None:
        """Note a look at the cluster at which the demand was unknown."""
        self._short_looks = dict.fromkeys(ROLES, 0)

    def forget(self) -> None:
        """Forget the judged requests and the needs from before the cluster changed."""
        self._judged.clear()
        self._needed.clear()

    def short_looks(self, role: Role) -> int:
        """Return at how many of the latest looks in a row a role was short of workers."""
        return self._short_looks[role]

    def max_need(self, role: Role) -> float:
        """Return the maximum number of workers that a role needed at any look of the last
        cooldown."""
        return max(need[role] for _, need in self._needed)

    def reason(self, role: Role) -> Reason:
        """Return the reason for the number of workers that a role needs."""
        return self._blamed[role] if self._extra[role] else Reason.FORECAST

    def _floors(self, demand: Demand, have: Mapping[Role, int]) -> dict[Role, float]:
        """Return how many workers of each role the token rates need. A role whose speed is unknown
        needs those that it has."""
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
            # A backlog beyond the SLO's batches slows the tokens, so their rate does not show it.
            by_sequences = demand.decode_sequences / demand.decode_batch
            need["decode"] = max(by_tokens, by_sequences) / config.target_load
        return need

    def _has_prefill(self, balance: RoleBalance) -> bool:
        """Whether there are prefill workers, or must be some."""
        return bool(balance.have["prefill"] or self._config.min_prefill)

    def _correct(self, balance: RoleBalance, demand: Demand, now: float, *, rested: bool) -> None:
        """Add a worker to the need of a role that misses its SLO although it is not short of
        workers; remove the worker later."""
        self._judged.append((now, demand.ttft, demand.tpot))
        while self._judged[0][0] < now - self._config.cooldown_s:
            self._judged.popleft()
        ttft = _total([one for _, one, _ in self._judged])
        tpot = _total([one for _, _, one in self._judged])
        for reason, figures in ((Reason.TTFT, ttft), (Reason.TPOT, tpot)):
            role = self._to_blame(reason, balance)
            if self._beyond(figures.tight, figures.judged):
                self._missed_at[role] = now
            if not self._beyond(figures.missed, figures.judged) or not rested:
                continue
            if balance.load(role) <= 1:
                self._extra[role] = balance.have[role] + 1 - balance.need[role]
                self._blamed[role] = reason
        for role in ROLES:
            eased_s = now - self._missed_at.get(role, -math.inf)
            if self._extra[role] and eased_s >= self._config.cooldown_s:
                self._extra[role] = max(0.0, self._extra[role] - 1)
                self._missed_at[role] = now

    def _to_blame(self, reason: Reason, balance: RoleBalance) -> Role:
        """Return the role to which a missed SLO is attributed. For TTFT it may be decode, since
        first tokens also wait for decode slots, or without prefill workers for decode workers'
        steps."""
        if reason is Reason.TPOT:
            return "decode"
        is_decode = balance.load("decode") > max(1.0, balance.load("prefill"))
        return "decode" if is_decode or not self._has_prefill(balance) else "prefill"

    def _beyond(self, count: float, judged: float) -> bool:
        """Whether there are at least ``MIN_JUDGED`` judged requests, and ``count`` is more than the
        fraction 1 - ``SLO_SHARE`` of them."""
        return judged >= MIN_JUDGED and count > (1 - SLO_SHARE) * judged


def _total(parts: Sequence[SloFigures]) -> SloFigures:
    return SloFigures(
        sum(one.judged for one in parts),
        sum(one.missed for one in parts),
        sum(one.tight for one in parts),
    )
