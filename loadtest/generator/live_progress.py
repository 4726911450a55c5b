"""How a run goes, while it goes: one line that is drawn anew, or now and then a line in a log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from loadtest.generator.load_driver import LiveCounts
from loadtest.generator.targets.target import RunClock

_DRAW_S = 0.5
_SAY_S = 10.0

Say = Callable[[str], None]


class LiveProgress:
    """Looks at a run's counts. Owned by the run's event loop; cancelled when that has ended."""

    def __init__(
        self, counts: LiveCounts, clock: RunClock, seconds: float, console: Console, say: Say
    ) -> None:
        """``seconds`` in which requests are sent. Draws where ``console`` is a terminal."""
        self._counts, self._clock, self._seconds = counts, clock, seconds
        self._console, self._say = console, say
        self._before = (time.monotonic(), 0, 0, 0)
        self._rates = (0.0, 0.0, 0.0)

    async def run(self) -> None:
        """Until it is cancelled."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(_SAY_S)
                self._say(self.line())
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self._drawn(), refresh=True)
                await asyncio.sleep(_DRAW_S)

    def line(self) -> str:
        """Counts until now; rates since the last call."""
        counts = self._counts
        now = (time.monotonic(), counts.sent, counts.ended, counts.output_tokens)
        past_s = now[0] - self._before[0]
        if past_s > _DRAW_S / 2:
            changes = zip(now[1:], self._before[1:], strict=True)
            sent, ended, tokens = (new - old for new, old in changes)
            self._rates = (sent / past_s, ended / past_s, tokens / past_s)
            self._before = now
        of_all = "" if counts.planned is None else f" of {counts.planned}"
        bad = ", ".join(
            f"{count} {outcome}" for outcome, count in counts.outcomes.items() if outcome != "ok"
        )
        return (
            f"{self._clock.now():.0f} s: {counts.sent}{of_all} sent, {self._rates[0]:.1f}/s;"
            f" {counts.ended} ended, {self._rates[1]:.1f}/s, {self._rates[2]:.0f} tokens/s;"
            f" {counts.under_way} under way{'; ' + bad if bad else ''}"
        )

    def _drawn(self) -> Table:
        counts = self._counts
        done = min(1.0, self._clock.now() / self._seconds) if self._seconds else 0.0
        if counts.planned:
            done = counts.ended / counts.planned
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=1.0, completed=done, width=20), self.line())
        return grid
