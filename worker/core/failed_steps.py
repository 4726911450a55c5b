"""When failed steps end a worker: an engine that fails step after step serves no request.

One step may fail because of one request, and a worker that serves others must survive that. So
failed steps count only if they are in a row, without a successful step between them. They do not
count while they all have a request in common: routers place such a request again, until it has
failed too often. A step that was planned before the failure was known does not count either, since
it lacks the failed step's result.

Pure. Owned by the engine core.
"""

from __future__ import annotations

from collections.abc import Set

MAX_FAILED_STEPS = 3
"""Number of failed steps in a row that ends the worker."""


class FailedSteps:
    """Counts the failed steps in a row, and decides when they end the worker."""

    def __init__(self) -> None:
        self.count = 0
        """Number of failed steps in a row, without steps that were planned before the last counted
        failure was known."""
        self._planned = 0
        """Number of the latest step that was already planned when the last failure was counted.
        Failures of steps up to this one do not count."""
        self._common: Set[str] | None = None
        """Requests that were in every failed step of the current row. None if no failed step has
        ended a request."""

    def end_row(self) -> None:
        """Reset the count of failed steps, because a step has succeeded."""
        self.count = 0
        self._common = None

    def add(self, step: int, planned: int, requests: Set[str]) -> bool:
        """Count step ``step`` as failed. ``planned`` is the number of the latest planned step.

        ``requests`` are the requests that the failure has ended. It is empty if all of them had
        ended before. Returns whether the worker has to end.
        """
        if self.count and step <= self._planned:
            return False
        if requests:
            self._common = requests if self._common is None else self._common & requests
        self.count += 1
        self._planned = planned
        return self.count >= MAX_FAILED_STEPS and not self._common
