"""Finds workers that hang while they have requests of this router.

A worker with something to do sends messages, and its engine ends steps. One that is silent for
``hang_s``, or whose engine ends no step for ``engine_hang_s``, is left by its requests
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
"""How often messages and steps are counted."""


class HangDetector:
    """Watches the workers of all attempts."""

    def __init__(
        self, config: Config, links: WorkerLinks, placement: Placement, failover: Failover
    ) -> None:
        self._links = links
        self._placement = placement
        self._failover = failover
        self._messages = SilenceWatch[str](config.advanced.hang_s)
        self._steps = SilenceWatch[str](config.advanced.engine_hang_s)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        # A router that watches its workers no longer would be worse than any error.
        errors = ErrorRow(log, "the workers could not be watched")
        while True:
            await asyncio.sleep(WATCH_S)
            with errors.caught():
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Report the workers that have been silent, or have stood still, for too long."""
        self._links.listen(now)
        for name in self._messages.tick(self.expected_messages(), now):
            if (link := self._links.get(name)) is not None:
                log.warning("worker %s is silent", name)
                self._failover.worker_silent(link)
        for name in self._steps.tick(self.expected_steps(), now):
            if (link := self._links.get(name)) is not None:
                log.warning("the engine of worker %s stands still", name)
                self._failover.worker_stalled(link)

    def expected_messages(self) -> dict[str, int]:
        """The messages that have come of each worker with something to do, by incarnation."""
        return {link.record.incarnation: link.messages for link in self._busy()}

    def expected_steps(self) -> dict[str, int]:
        """The ended steps of each of these whose engine computes one, by incarnation."""
        loads = {link.record.incarnation: link.engine_load for link in self._busy()}
        return {name: load.engine_steps for name, load in loads.items() if load.steps_in_flight}

    def _busy(self) -> set[WorkerLink]:
        links = set()
        for attempt in self._placement.attempts:
            # Once the first token has come, the decode worker has a ticket for it.
            if attempt.promise.is_computed or attempt.decode_began.is_set():
                links.add(attempt.target)
            if attempt.computes:
                links.add(attempt.source)
        return links
