"""Finds a plan: the cheapest cluster that meets its target, and alternatives for comparison.

For each kind of cluster it searches the cheapest counts for the traffic's peak (``search``),
starting at the analytic floor. A kind whose floor costs more than the best cluster so far is
skipped. On CPUs, the fewest decode workers that compute their own prompts replace the result if
they meet the target for no more money: workers of one machine share its cores anyway. The result
then serves all of the traffic, and grows if that misses the target. Last, other transports are
tried with the same workers, and the one with the lowest requirements is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from baton.errors import ConfigError
from planning.planner.alternatives import (
    Candidate,
    advised,
    at_ratio,
    colocated,
    neighbours,
    same_money,
)
from planning.planner.batch_size import best_size, with_size
from planning.planner.cluster_kind import ClusterKind, Counts, ResourceBudget, Transport
from planning.planner.evaluation import Evaluation
from planning.planner.lower_bound import lower_bound
from planning.planner.plan import Plan, PlannedCluster, SizeSearch
from planning.planner.search import best_split, cheapest, least
from planning.planner.worker_kinds import Roles, cluster_kinds, transport_of

_MIN_GAIN = 0.01
"""Minimum rise in attainment, as a share of requests. If twice the workers raise attainment by
less, that pool does not limit the plan."""


class CapacityPlanner:
    """Searches for one plan."""

    def __init__(
        self,
        evaluation: Evaluation,
        roles: Roles,
        transports: Sequence[Transport],
        budget: ResourceBudget,
        target: float,
        *,
        needs_prefill: bool = False,
    ) -> None:
        """``transports`` has at least one transport. They are sorted by requirements, the lowest
        first. ``needs_prefill``: whether the operator leaves prompts to prefill workers alone."""
        self._evaluation = evaluation
        self._transports = transports
        self._budget = budget
        self._target = target
        self._needs_prefill = needs_prefill
        self._reachable = roles.reachable
        self._remarks = list(roles.dropped)
        kinds = cluster_kinds(roles, _fastest(transports))
        self._floors = {kind: self._floor(kind) for kind in kinds}
        self._kinds = sorted(kinds, key=lambda kind: kind.price_per_hour(self._floors[kind]))

    def plan(self) -> Plan:
        """Search for the plan, and compare it with alternatives."""
        found = self._cheapest() if self._reachable else None
        kind, counts = found or self._best_attainable()
        sizes = None
        if found:
            kind, counts = self._without_prefill(kind, counts)
            kind = self._simplest(kind, counts)
            sizes = best_size(self._evaluation, kind, counts)
            kind = self._sized(kind, counts, sizes)
        chosen = replace(
            self._cluster("the plan" if found else "best in the budget", kind, counts),
            whole=self._evaluation.figures(kind, counts, "whole"),
        )
        return Plan(
            target=self._target,
            is_met=found is not None,
            chosen=chosen,
            others=tuple(self._cluster(*one) for one in self._beside(kind, counts)),
            sizes=sizes,
            twice=self._evaluation.figures(kind, counts, "twice the peak"),
            limits="" if found else self._limits(kind, counts),
            remarks=tuple(self._remarks),
        )

    # Known facts about a candidate

    def _floor(self, kind: ClusterKind) -> Counts:
        """Return the lower bound on the worker counts for the most demanding trace."""
        each = [
            lower_bound(kind, one, self._evaluation.config, self._target)
            for one in self._evaluation.traffic["peak"]
        ]
        return Counts(max(one.prefill for one in each), max(one.decode for one in each))

    def _cluster(self, name: str, kind: ClusterKind, counts: Counts) -> PlannedCluster:
        return PlannedCluster(name, kind, counts, self._evaluation.figures(kind, counts, "peak"))

    def _meets_peak(self, kind: ClusterKind, counts: Counts) -> bool:
        return self._evaluation.figures(kind, counts, "peak").attainment >= self._target

    def _meets(self, kind: ClusterKind, counts: Counts) -> bool:
        if not self._meets_peak(kind, counts):
            return False
        return self._evaluation.figures(kind, counts, "whole").attainment >= self._target

    # Search

    def _cheapest(self) -> tuple[ClusterKind, Counts] | None:
        best: tuple[ClusterKind, Counts] | None = None
        for kind in self._kinds:
            limit = math.inf if best is None else best[0].price_per_hour(best[1])
            lowest = kind.price_per_hour(self._floors[kind])
            if lowest >= limit:
                self._remarks.append(
                    f"{kind.name}: it needs at least {_counted(self._floors[kind])} workers, for "
                    f"${lowest:.2f}/h"
                )
                continue
            found = self._cheapest_of(kind, limit)
            if found is None:
                bound = "in the budget" if best is None else f"below ${limit:.2f}/h"
                self._remarks.append(f"{kind.name}: no cluster {bound} meets the target")
            else:
                best = (kind, found)
        return best

    def _cheapest_of(self, kind: ClusterKind, limit: float) -> Counts | None:
        def allows(counts: Counts) -> bool:
            return self._budget.allows(kind, counts) and kind.price_per_hour(counts) < limit

        counts = cheapest(
            lambda one: self._meets_peak(kind, one),
            kind.price_per_hour,
            allows,
            self._floors[kind],
        )
        while counts is not None and not self._meets(kind, counts):
            # The peak was served well, but not all of the traffic.
            prefill, decode = counts
            larger = [Counts(prefill + 1, decode), Counts(prefill, decode + 1)]
            counts = max(
                (one for one in larger if allows(one)),
                key=lambda one: self._evaluation.figures(kind, one, "whole").attainment,
                default=None,
            )
        return counts

    def _without_prefill(self, kind: ClusterKind, counts: Counts) -> tuple[ClusterKind, Counts]:
        """Return the fewest decode workers that compute their own prompts, if they run on CPUs and
        meet the target for no more money. Otherwise return the arguments."""
        if self._needs_prefill or not kind.decode.profile.is_cpu:
            return kind, counts
        _, other, fewest = self._colocated(kind, counts)[-1]
        is_dearer = other.price_per_hour(fewest) > kind.price_per_hour(counts)
        return (kind, counts) if is_dearer or not self._meets(other, fewest) else (other, fewest)

    def _simplest(self, kind: ClusterKind, counts: Counts) -> ClusterKind:
        """Return the cluster kind with the first transport that meets the target. It is the one
        with the lowest requirements."""
        for other in self._over(kind):
            if self._budget.allows(other, counts) and self._meets(other, counts):
                return other
        return kind

    def _sized(self, kind: ClusterKind, counts: Counts, sizes: SizeSearch) -> ClusterKind:
        """Return the same workers with the best batch size, if the plan still meets its target."""
        sized = with_size(kind, sizes.best.size)
        if sizes.best is sizes.own or not self._meets(sized, counts):
            return kind
        return sized

    def _over(self, kind: ClusterKind) -> list[ClusterKind]:
        """Return cluster kinds with the same workers as ``kind``, one for each transport."""
        found = [
            replace(kind, transport=transport_of(kind.prefill, kind.decode, one))
            for one in self._transports
        ]
        return list(dict.fromkeys(found))

    # Result when the target is out of reach

    def _best_attainable(self) -> tuple[ClusterKind, Counts]:
        found: list[tuple[float, ClusterKind, Counts]] = []
        for kind in self._kinds:
            counts = best_split(
                partial(self._attained, kind),
                partial(self._budget.allows, kind),
                self._floors[kind],
            )
            if counts is not None:
                found.append((self._attained(kind, counts), kind, counts))
        if not found:
            raise ConfigError(
                f"{self._budget.text()} cannot buy one worker of each role; the smallest would be "
                f"{self._kinds[0].name}"
            )
        _, kind, counts = max(found, key=lambda one: one[0])
        return kind, counts

    def _attained(self, kind: ClusterKind, counts: Counts) -> float:
        return self._evaluation.figures(kind, counts, "peak").attainment

    def _limits(self, kind: ClusterKind, counts: Counts) -> str:
        """Describe what limits the plan: the pool whose attainment gains from twice its workers."""
        prefill, decode = counts
        now = self._attained(kind, counts)
        more = {
            "the prefill pool": self._attained(kind, Counts(2 * prefill, decode)),
            "the decode pool": self._attained(kind, Counts(prefill, 2 * decode)),
        }
        if max(more.values()) < now + _MIN_GAIN:
            more["both pools"] = self._attained(kind, Counts(2 * prefill, 2 * decode))
        what = ", ".join(f"{share:.1%} with twice {pool}" for pool, share in more.items())
        pool = max(more, key=lambda one: more[one])
        if not self._reachable or more[pool] < now + _MIN_GAIN:
            return (
                "no number of workers suffices: a single one is too slow for the SLOs "
                f"({now:.1%}; {what})"
            )
        return f"{pool} ({now:.1%}; {what})"

    # Alternatives

    def _beside(self, kind: ClusterKind, counts: Counts) -> list[Candidate]:
        others = {one: self._floors[one] for one in self._kinds if _workers(one) != _workers(kind)}
        found = [
            *neighbours(kind, counts),
            *(Candidate(f"over {one.transport.name}", one, counts) for one in self._over(kind)),
            *same_money(others, kind.price_per_hour(counts)),
            *(
                one
                for ratio in advised(self._evaluation.traffic["whole"])
                for one in at_ratio(kind, counts, ratio)
            ),
            *self._colocated(kind, counts),
        ]
        return [
            one
            for one in found
            if (one.kind, one.counts) != (kind, counts) or one.name.startswith("wisdom")
            if self._budget.allows(one.kind, one.counts)
        ]

    def _colocated(self, kind: ClusterKind, counts: Counts) -> list[Candidate]:
        """Return two colocated clusters: one with the plan's number of GPUs, and the smallest one
        that meets the target."""
        alike = colocated(kind, counts)

        def meets(workers: int) -> bool:
            return self._meets_peak(alike.kind, Counts(0, workers))

        most = alike.counts.decode
        if not meets(most):
            return [alike]
        fewest = Counts(0, least(1, most, meets))
        return [alike, alike._replace(name="colocated, the fewest", counts=fewest)]


def _fastest(transports: Sequence[Transport]) -> Transport:
    """Return the fastest transport. If any transports work between machines, choose among those.
    With the result, no cluster needs more workers than with another transport."""
    wide = [one for one in transports if not one.one_machine]
    return (wide or transports)[-1]


def _counted(counts: Counts) -> str:
    return f"{counts.prefill} + {counts.decode}"


def _workers(kind: ClusterKind) -> tuple[str, str]:
    return kind.prefill.name, kind.decode.name
