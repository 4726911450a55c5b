"""When the next step may be planned, and how many prompt tokens it may compute.

The part of the engine core that needs neither a thread nor an event loop. Plain Python; owned by
the engine core.
"""

from __future__ import annotations

from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import ReturnsHere, Scheduler
from worker.core.chunk_slack import ChunkSlack
from worker.core.step_history import MeanStep, StepHistory

_DEPTH = 2
"""Most plans in flight."""


class StepPlanner:
    """See the module's text."""

    def __init__(
        self,
        scheduler: Scheduler,
        slack: ChunkSlack | None,
        *,
        is_cpu: bool,
        returns_here: ReturnsHere | None = None,
    ) -> None:
        """``slack`` bounds the prompt tokens of a step in which others decode; without it nothing

        but the step's own limits does. ``is_cpu``: whether steps are computed on a CPU.
        ``returns_here`` is as ``Scheduler.schedule`` takes it.
        """
        self._scheduler = scheduler
        self._slack = slack
        self._is_cpu = is_cpu
        self._returns_here = returns_here
        self._history = StepHistory()
        self._last_plan: StepPlan | None = None

    def next_plan(self) -> StepPlan | None:
        """The next step, None where it is not its time yet or nothing is to be computed."""
        if not self._may_plan():
            return None
        plan = self._scheduler.schedule(self._max_prompt_tokens(), self._returns_here)
        if plan is not None:
            self._last_plan = plan
        return plan

    def _may_plan(self) -> bool:
        """The next step is planned while one runs, so that the engine never waits for its plan.

        On a CPU not behind a long step: whoever comes meanwhile would wait for the next one too.
        """
        in_flight = self._scheduler.plans_in_flight
        if in_flight != 1 or not self._is_cpu:
            return in_flight < _DEPTH
        return self._last_plan is not None and self._last_plan.decodes_only

    def _max_prompt_tokens(self) -> int | None:
        """What the next step may compute of prompts; None where no sequence waits beside them."""
        if self._slack is None:
            return None
        decoding = self._scheduler.decoding
        start = self._scheduler.next_chunk_start
        if not decoding or start is None:
            return None
        context_tokens = sum(sequence.target for sequence in decoding)
        return self._slack.max_tokens(len(decoding), context_tokens, start)

    def observe(self, plan: StepPlan, result: StepResult, wall_ms: float) -> None:
        """A step has ended, so long after the one before it or after it was asked for."""
        self._history.observe(plan, result, wall_ms)
        if self._slack is not None:
            self._slack.observe(plan, wall_ms)

    def mean_step(self) -> MeanStep:
        """The latest steps in which every sequence decoded."""
        return self._history.mean()
