"""The way of KV blocks from worker to worker. Plain Python, seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Wire:
    """One worker's end: what leaves goes out one after another, what comes likewise."""

    bytes_per_s: float
    """Each way."""
    latency_s: float = 0.0
    """From the last byte's leaving to its being in place."""
    sends_until: float = 0.0
    receives_until: float = 0.0
    sent_bytes: float = 0.0
    busy_s: float = 0.0
    """Time in which something left."""

    def send(self, to: Wire, size: float, ready_s: float) -> float:
        """Send ``size`` bytes that are there at ``ready_s``; returns when the last one is in place.

        Transfers are first come, first served at both ends, at the speed of the slower one. Fair
        sharing would end the last of several at the same time, and the others later.
        """
        begins = max(ready_s, self.sends_until, to.receives_until)
        took = size / min(self.bytes_per_s, to.bytes_per_s)
        self.sends_until = to.receives_until = begins + took
        self.sent_bytes += size
        self.busy_s += took
        return begins + took + self.latency_s
