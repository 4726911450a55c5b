"""Finds workers that hang while they have requests of this router.

A busy worker sends messages, and its engine finishes steps. Requests leave a worker that is silent
for ``hang_s``, or whose engine finishes no step for ``engine_hang_s``
(``router.dispatch.failover``). Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time

from baton.config.cluster import Config
from baton.liveness.silence import SilenceWatch
from baton.telemetry.logs import ErrorRow
from router.dispatch.failover import Failover
from router.dispatch.placement import Placement
from router.workers.worker_link import WorkerLink
from router.workers.worker_links import WorkerLinks

log = logging.getLogger(__name__)

WATCH_S = 0.1
"""Interval in seconds at which the messages and steps of workers are counted."""


class HangDetector:
    """Detects workers that hang while they have requests of this router."""

    def __init__(
        self, config: Config, links: WorkerLinks, placement: Placement, failover: Failover
    ) -> None:
        self._links = links
        self._placement = placement
        self._failover = failover
        self._messages = SilenceWatch[str](config.advanced.hang_s)
        self._steps = SilenceWatch[str](config.advanced.engine_hang_s)

    async def run(self) -> None:
        """Check the workers periodically, until cancelled."""
        # A failed check must not stop the watch: hung workers would stay undetected.
        errors = ErrorRow(log, "the check for hung workers failed")
        while True:
            await asyncio.sleep(WATCH_S)
            with errors.caught():
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Report to failover the workers that have been silent or stalled for too long at time
        ``now``."""
        self._links.listen(now)
        for name in self._messages.tick(self.expected_messages(), now):
            if (link := self._links.get(name)) is not None:
                log.warning("worker %s is silent", name)
                self._failover.worker_silent(link)
        for name in self._steps.tick(self.expected_steps(), now):
            if (link := self._links.get(name)) is not None:
                log.warning("the engine of worker %s finishes no step", name)
                self._failover.worker_stalled(link)

    def expected_messages(self) -> dict[str, int]:
        """Return the number of messages received so far from each busy worker, by incarnation."""
        return {link.record.incarnation: link.messages for link in self._busy()}

    def expected_steps(self) -> dict[str, int]:
        """Return the number of steps that each busy worker's engine has finished, by incarnation.
        Only workers whose engine runs a step are included."""
        loads = {link.record.incarnation: link.engine_load for link in self._busy()}
        return {name: load.engine_steps for name, load in loads.items() if load.steps_in_flight}

    def _busy(self) -> set[WorkerLink]:
        links = set()
        for attempt in self._placement.attempts:
            # After the first token, the decode worker holds a ticket for the request.
            if attempt.promise.is_computed or attempt.decode_began.is_set():
                links.add(attempt.target)
            if attempt.computes:
                links.add(attempt.source)
        return links
