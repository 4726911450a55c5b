"""Ray's control store (GCS) is ended when it lives and does not answer; it is started again then.

    answering ─no answer for SILENT_S→ silent, and killed ─its next process→ answering

Its death alone tells nothing of one that hangs: it waits for its store by the wall clock, so that a
clock that is set back while the store is away makes it wait for as long as the clock was set back.
Until then nobody would hear of dead workers, and none would be replaced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol

from baton.liveness.silence import SilenceWatch

SILENT_S = 15.0
"""Without an answer. It starts, and reads its store, in less."""
_ASK_S = 2.0
_EACH_S = 1.0

log = logging.getLogger(__name__)


class Gcs(Protocol):
    """Its process of the moment."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """SIGKILL; never raises."""


class GcsWatch:
    """Lives in the launcher's loop; it never blocks."""

    def __init__(
        self,
        gcs: Gcs,
        ask: Callable[[float], Coroutine[Any, Any, None]],
        report: Callable[[str], None],
        max_s: float = SILENT_S,
    ) -> None:
        """``ask(timeout_s)`` returns once the GCS has read from its store, and raises else: about

        then, never much later.
        """
        self._gcs = gcs
        self._ask = ask
        self._report = report
        self._max_s = max_s
        self._silence = SilenceWatch[int](max_s)
        self._answers = 0

    async def run(self) -> NoReturn:
        """Until it is cancelled."""
        while True:
            await self._ask_it()
            # The next process has the same time to start.
            if self._silence.tick({self._gcs.pid: self._answers}, time.monotonic()):
                self._report(f"gcs has not answered for {self._max_s:.0f} s; it is ended")
                self._gcs.kill()
            await asyncio.sleep(_EACH_S)

    async def _ask_it(self) -> None:
        try:
            await self._ask(_ASK_S)
        except Exception as error:
            log.debug("gcs: %s", error)
        else:
            self._answers += 1


class FarGcsWatch:
    """Of one that others start again: says when it is silent, and when it is back."""

    def __init__(
        self,
        ask: Callable[[float], Coroutine[Any, Any, None]],
        report: Callable[[str], None],
        max_s: float = SILENT_S,
    ) -> None:
        """As for ``GcsWatch``."""
        self._ask = ask
        self._report = report
        self._max_s = max_s

    async def run(self) -> NoReturn:
        """Until it is cancelled."""
        silence, answers, told = SilenceWatch[str](self._max_s), 0, False
        while True:
            try:
                await self._ask(_ASK_S)
            except Exception as error:
                log.debug("Ray's control store: %s", error)
            else:
                answers += 1
            silence.tick({"gcs": answers}, time.monotonic())
            silent = silence.is_silent("gcs")
            if silent != told:
                told = silent
                self._report(
                    "Ray's control store does not answer: workers serve on, and none is replaced"
                    if silent
                    else "Ray's control store is back"
                )
            await asyncio.sleep(_EACH_S)
