"""A cluster that is a list, for the autoscaler's tests: it executes orders at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.autoscaling.autoscaler import Action, Autoscaler, Bounds, ChangeRole
from baton.autoscaling.cluster_figures import (
    ROLES,
    ClusterFigures,
    Demand,
    SloFigures,
    WorkerFigures,
    WorkerState,
    other,
)
from baton.config.autoscaler import AutoscalerConfig
from baton.config.choices import Role

INPUT_PER_WORKER, OUTPUT_PER_WORKER, BATCH = 1000.0, 200.0, 10.0
"""Tokens a second that one worker can do, and its sequences then."""
POOLS: dict[Role, str] = {"prefill": "p", "decode": "d"}
REQUESTS = 40.0
"""Of each look."""
SETTINGS = AutoscalerConfig(
    enabled=True, interval_s=10, cooldown_s=60, min_workers=2, max_workers=8
)


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens a second that come."""

    input: float = 0.0
    output: float = 0.0


class AutoscaledCluster:
    """Looks every interval; ``moves`` has the workers that each role gained or lost, and when."""

    def __init__(self, prefill: int, decode: int, settings: AutoscalerConfig = SETTINGS) -> None:
        self.settings = settings
        self.workers = [*_workers("prefill", prefill), *_workers("decode", decode)]
        self.now = 1000.0
        self.moves: list[tuple[float, Role, int]] = []
        self.actions: list[Action] = []
        self.bounds = Bounds.of(settings, prefill + decode)
        self.begin()

    def begin(self) -> None:
        """Another autoscaler, as after its process was started again."""
        self.autoscaler = Autoscaler(self.settings, self.bounds, POOLS)

    def have(self, role: Role) -> int:
        return sum(one.role == role for one in self.workers)

    def figures(self, load: Load) -> ClusterFigures:
        prompts, answers = load.input / INPUT_PER_WORKER, load.output / OUTPUT_PER_WORKER
        if not self.have("prefill"):
            # Decode workers compute the prompts.
            answers += prompts
            prompts = 0.0 if answers <= self.have("decode") else prompts
        late = REQUESTS if prompts > self.have("prefill") else 0.0
        slow = REQUESTS if answers > self.have("decode") else 0.0
        asked = REQUESTS if load.input or load.output else 0.0
        demand = Demand(
            seconds=self.settings.interval_s,
            input_tokens_per_s=load.input,
            output_tokens_per_s=load.output,
            prefill_s_per_token=1 / INPUT_PER_WORKER,
            decode_tokens_per_s=OUTPUT_PER_WORKER,
            decode_batch=BATCH,
            decode_sequences=BATCH * load.output / OUTPUT_PER_WORKER,
            ttft=SloFigures(asked, late, late),
            tpot=SloFigures(asked, slow, slow),
        )
        return ClusterFigures(tuple(self.workers), demand)

    def look(self, load: Load) -> tuple[Action, ...]:
        """One look, and what follows."""
        return self.look_at(self.figures(load))

    def look_at(self, figures: ClusterFigures) -> tuple[Action, ...]:
        """The same of other figures than its own."""
        actions = self.autoscaler.decide(figures, self.now)
        for action in actions:
            self.carry_out(action)
        if actions:
            self.autoscaler.acted(self.now)
        self.actions += actions
        self.now += self.settings.interval_s
        return actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, ChangeRole):
            self.turn(action.slot, action.role)
            self.moves += [(self.now, action.role, 1), (self.now, other(action.role), -1)]
            return
        before = {role: self.have(role) for role in ROLES}
        self.resize(action.pool, action.by)
        self.moves += [
            (self.now, role, self.have(role) - count)
            for role, count in before.items()
            if self.have(role) != count
        ]

    def turn(self, slot: str, role: Role) -> None:
        """As `baton role`."""
        place = next(n for n, one in enumerate(self.workers) if one.slot == slot)
        self.workers[place] = replace(self.workers[place], role=role)

    def resize(self, pool: str, by: int) -> None:
        """As `baton scale`."""
        own = sorted((one for one in self.workers if one.pool == pool), key=lambda one: one.number)
        if by < 0:
            self.workers.remove(own[-1])
            return
        role = next(role for role, name in POOLS.items() if name == pool)
        self.workers.append(_worker(role, len(own)))


def _workers(role: Role, count: int) -> list[WorkerFigures]:
    return [_worker(role, number) for number in range(count)]


def _worker(role: Role, number: int) -> WorkerFigures:
    slot = f"{POOLS[role]}-{number}"
    life = f"{slot}:1"
    return WorkerFigures(slot, POOLS[role], number, role, WorkerState.SERVING, life)
