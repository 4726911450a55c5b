"""A machine whose workers slow one another down. Plain Python; owned by the simulation.

What a worker does: nothing, or a step that decodes, or a step with prompts; and after steps with
prompts for ``PATIENCE_S`` without a break of ``BREAK_S``, long prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.costs.sharing import Doing, Sharing
from worker.cores.core_sharing import BREAK_S, PATIENCE_S


class Tenant(Protocol):
    """A worker of a host."""

    @property
    def sharing(self) -> Sharing:
        """What others cost it."""

    def change_speed(self, speed: float) -> None:
        """From now on so much engine time passes in a second."""


@dataclass(slots=True)
class _Seen:
    """What is known of a tenant."""

    doing: Doing = Doing.NOTHING
    speed: float = 1.0
    prompts_since: float = -math.inf
    """Since when it has computed prompts without a break."""
    prompts_until: float = -math.inf
    """When it last ended to."""


class Host:
    """Knows what each of its workers does, and tells each how fast it is."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._seen: dict[Tenant, _Seen] = {}

    def join(self, tenant: Tenant) -> None:
        """One more worker; it does nothing yet."""
        self._seen[tenant] = _Seen()

    def tell(self, tenant: Tenant, doing: Doing) -> None:
        """What a worker does from now on: nothing, decoding or prompts."""
        seen, now = self._seen[tenant], self._events.now
        before = Doing.PROMPTS if seen.doing is Doing.LONG_PROMPTS else seen.doing
        if doing is before:
            return
        if before is Doing.PROMPTS:
            seen.prompts_until = now
        if doing is Doing.PROMPTS:
            if now - seen.prompts_until > BREAK_S:
                seen.prompts_since = now
                self._events.after(PATIENCE_S, lambda: self._is_long(tenant, now))
            elif now - seen.prompts_since >= PATIENCE_S:
                doing = Doing.LONG_PROMPTS
        seen.doing = doing
        self._tell_speeds()

    def _is_long(self, tenant: Tenant, since: float) -> None:
        seen = self._seen[tenant]
        if seen.doing is Doing.PROMPTS and seen.prompts_since == since:
            seen.doing = Doing.LONG_PROMPTS
            self._tell_speeds()

    def _tell_speeds(self) -> None:
        for tenant, seen in self._seen.items():
            others = [other.doing for one, other in self._seen.items() if one is not tenant]
            speed = 1.0 / tenant.sharing.stretch(seen.doing, others)
            if speed != seen.speed:
                seen.speed = speed
                tenant.change_speed(speed)
