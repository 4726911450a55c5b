"""Whether a worker's process is still of any use, as a thread beside its event loop sees it. Pure.

It looks once in ``LOOK_S``.
"""

from __future__ import annotations

from baton.liveness.silence import SilenceWatch

LOOK_S = 1.0
STUCK_S = 60.0
"""So long without a heartbeat, while this thread ran: the event loop is stuck, or what it waits for
will not come. A heartbeat without Redis takes some seconds."""
END_S = 30.0
"""How much later than the deadline of its drain a worker may end."""


class LifeWatch:
    """Owned by the thread that looks."""

    def __init__(self) -> None:
        self._silence = SilenceWatch[str](STUCK_S)

    def look(
        self, now: float, *, beats: int | None, ended: bool, leave_by: float | None
    ) -> str | None:
        """Why the process is to end, None where it is to go on.

        ``beats``: heartbeats so far, None while it does not serve. ``ended``: whether the worker's
        own thread has, though nobody told it to. ``leave_by``: until when a worker that is drained
        may run what it has; on the clock of ``now``, monotonic, in seconds.
        """
        if ended:
            return "its thread has ended"
        if leave_by is not None:
            return "its drain does not end" if now > leave_by + END_S else None
        if self._silence.tick({} if beats is None else {"event loop": beats}, now):
            return f"its event loop has done nothing for {STUCK_S:.0f} s"
        return None
