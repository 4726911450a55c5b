"""When failed steps end a worker: an engine that fails step after step serves no request.

One step may fail because of one request, and a worker that serves others must outlive that. So
failed steps count only in a row, without a step between them that ended well, and not while all of
them have a request in common: routers place such a request again, until it has failed too often.
A step that was planned before the failure was known does not count either: it lacks what the failed
one should have brought.

Pure. Owned by the engine core.
"""

from __future__ import annotations

from collections.abc import Set

MAX_FAILED_STEPS = 3
"""So many failed steps in a row end the worker."""


class FailedSteps:
    """Counts the failed steps in a row."""

    def __init__(self) -> None:
        self.count = 0
        """Those that count."""
        self._planned = 0
        """The last step that was planned when the last counted one failed."""
        self._common: Set[str] | None = None
        """Requests that were in all of the row's steps; None where no step had any left."""

    def end_row(self) -> None:
        """A step has ended well."""
        self.count = 0
        self._common = None

    def add(self, step: int, planned: int, requests: Set[str]) -> bool:
        """Count failed step ``step``; ``planned`` is the step of the latest plan.

        ``requests`` are those that the failure has ended: none where all had left before. Returns
        whether the worker is to end.
        """
        if self.count and step <= self._planned:
            return False
        if requests:
            self._common = requests if self._common is None else self._common & requests
        self.count += 1
        self._planned = planned
        return self.count >= MAX_FAILED_STEPS and not self._common
