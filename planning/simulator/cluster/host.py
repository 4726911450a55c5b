"""Shared resources of simulated workers: cores and memory of a host, and the network.

Plain Python, numpy. Owned by the simulation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.step_log import Floats
from planning.simulator.costs.sharing import Doing, Sharing
from worker.cores.core_sharing import BREAK_S, PATIENCE_S


class Tenant(Protocol):
    """A worker that runs on a simulated host."""

    @property
    def sharing(self) -> Sharing:
        """Return the factors by which other workers of the host slow this one."""

    def change_speed(self, speed: float) -> None:
        """Set the worker's speed: the seconds of engine time that pass in a second of virtual
        time."""


@dataclass(slots=True)
class _Seen:
    """A host's record of what one of its workers does."""

    doing: Doing = Doing.NOTHING
    speed: float = 1.0
    prompts_since: float = -math.inf
    """Virtual time at which the worker began to compute prompts, without a break since then."""
    prompts_until: float = -math.inf
    """Virtual time at which the worker last stopped computing prompts."""


class Host:
    """Tracks what each worker of a host does, and sets each worker's speed.

    A worker does nothing, runs a decode step or runs a step with prompts; after steps with prompts
    for ``PATIENCE_S`` without a break of ``BREAK_S``, it runs long prompts.
    """

    def __init__(self, name: str, events: EventQueue) -> None:
        self.name = name
        self._events = events
        self._seen: dict[Tenant, _Seen] = {}

    def join(self, tenant: Tenant) -> None:
        """Add a worker to the host. The worker does nothing yet."""
        self._seen[tenant] = _Seen()

    def tell(self, tenant: Tenant, doing: Doing) -> None:
        """Record the worker's activity from now on: nothing, decoding or prompts. Update the speeds
        of the host's workers."""
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


class WorkClock:
    """Converts virtual time to engine time and back, for an engine whose speed changes.

    Engine time is that of an engine on an otherwise idle host: in a second of virtual time, it
    advances by the engine's speed. While the speed has never changed, both are equal.
    """

    def __init__(self) -> None:
        self.speed = 1.0
        """Seconds of engine time that pass in a second of virtual time; positive."""
        self._moments = [0.0]
        """Virtual times at which the speed changed, rising."""
        self._engine_times = [0.0]
        """Engine times that correspond to ``_moments``."""

    def change(self, now: float, speed: float) -> None:
        """Change the speed from the virtual time ``now`` on. ``now`` is not before the last
        change."""
        if now > self._moments[-1]:
            engine_time = self.engine_time(now)
            self._moments.append(now)
            self._engine_times.append(engine_time)
        self.speed = speed

    def engine_time(self, moment: float) -> float:
        """Return the engine time that corresponds to ``moment``. ``moment`` is a virtual time after
        the last change of speed.
        """
        return self._engine_times[-1] + (moment - self._moments[-1]) * self.speed

    def moment(self, engine_time: float) -> float:
        """Return the virtual time that corresponds to an engine time after the last change of
        speed.
        """
        return self._moments[-1] + (engine_time - self._engine_times[-1]) / self.speed

    def moments(self, engine_times: Floats) -> Floats:
        """Return the virtual times that correspond to engine times in rising order. The speed may
        have changed between them. fp64 [times]."""
        if len(self._moments) == 1 and self.speed == 1.0:
            return engine_times
        first = max(0, bisect_right(self._engine_times, engine_times[0]) - 1)
        last = bisect_right(self._engine_times, engine_times[-1]) + 1
        known, moments = self._engine_times[first:last], self._moments[first:last]
        if last > len(self._engine_times):
            beyond = engine_times[-1] + 1.0
            known, moments = [*known, beyond], [*moments, self.moment(beyond)]
        return np.interp(engine_times, known, moments)


@dataclass(slots=True)
class Wire:
    """One worker's network interface: it sends one transfer at a time, and receives one at a
    time."""

    bytes_per_s: float
    """Bandwidth of the interface in each direction, in bytes per second."""
    latency_s: float = 0.0
    """Time from sending the last byte to its arrival, in seconds."""
    sends_until: float = 0.0
    receives_until: float = 0.0
    sent_bytes: float = 0.0
    busy_s: float = 0.0
    """Time in which the interface was sending, in seconds."""

    def send(self, to: Wire, size: float, ready_s: float) -> float:
        """Send ``size`` bytes, available from the virtual time ``ready_s`` on, to the interface
        ``to``. Return the virtual time at which the last byte arrives.

        Transfers are first come, first served at both ends, at the speed of the slower one. Fair
        sharing would give the last of several transfers the same end, and the others a later one.
        """
        begins = max(ready_s, self.sends_until, to.receives_until)
        took = size / min(self.bytes_per_s, to.bytes_per_s)
        self.sends_until = to.receives_until = begins + took
        self.sent_bytes += size
        self.busy_s += took
        return begins + took + self.latency_s
