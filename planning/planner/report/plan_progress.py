"""How a search goes: one line on a terminal, elsewhere a line for each simulation."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape

from planning.planner.evaluation import Trial


class PlanProgress:
    """Owned by the command; a spinner runs while it is entered."""

    def __init__(self, console: Console, say: Callable[[str], None]) -> None:
        """Draws where ``console`` is a terminal."""
        self._say = say
        self._status = console.status("reading") if console.is_terminal else None
        self._best = ""

    def __enter__(self) -> PlanProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def hear(self, trial: Trial) -> None:
        """A simulation begins, or has ended."""
        if self._status is not None:
            if trial.figures is not None:
                self._best = trial.text()
            before = f" (before: {self._best})" if self._best and trial.figures is None else ""
            self._status.update(escape(f"simulation {trial.text()}{before}"))
        elif trial.figures is not None:
            self._say(trial.text())
