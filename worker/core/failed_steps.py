"""When failed steps end a worker: an engine that fails step after step serves no request.

A step may fail because of one request, and a worker that serves others must survive that. So the
sequences of a failed step run alone next, and those whose own steps fail end. Two counts decide:

- ``shared``: failed steps of several sequences in a row, although each sequence succeeds alone. It
  is reset by a step that is no such rerun, and by a sequence that fails alone, since that sequence
  explains the failure.
- ``alone``: sequences in a row that failed alone. Either each of their requests is at fault, or the
  engine fails for every request. A probe, a step of the worker's own, tells these cases apart.

A step that was planned before the failure was known does not count, since it lacks the failed
step's result.

Pure. Owned by the engine core.
"""

from __future__ import annotations

MAX_FAILED_STEPS = 3
"""Number of failed steps in a row after which the worker ends, or probes its engine."""


class FailedSteps:
    """Counts the failed steps in a row, and decides when they end the worker."""

    def __init__(self) -> None:
        self.shared = 0
        """Number of failed steps in a row that no sequence explains, or that could not be
        planned."""
        self.alone = 0
        """Number of sequences in a row that failed in steps of their own."""
        self._planned = 0
        """Number of the latest step that was already planned when the last failure was counted.
        Shared failures of steps up to this one do not count."""

    def count_success(self, *, rerun: bool) -> None:
        """Record a step that has succeeded. ``rerun``: true if it ran one sequence of a failed step
        alone."""
        self.alone = 0
        if not rerun:
            self.shared = 0

    def count_shared(self, step: int, planned: int) -> bool:
        """Record that step ``step`` has failed or could not be planned, and that its sequences run
        alone next. ``planned`` is the number of the latest planned step.

        Returns whether the worker has to end.
        """
        if self.shared and step <= self._planned:
            return False
        self.shared += 1
        self._planned = planned
        return self.shared >= MAX_FAILED_STEPS

    def count_alone(self) -> bool:
        """Record that a sequence has failed in a step of its own. Returns whether the engine has to
        be probed."""
        self.shared = 0
        self.alone += 1
        return self.alone >= MAX_FAILED_STEPS
