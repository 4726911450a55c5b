"""What a worker's steps did, against what its device does at most
(``engine/roofline.py``).

Drafts that a step checked are not counted: they are the price of its tokens, not their work. Plain
Python; owned by the control loop.
"""

from __future__ import annotations

from engine.checkpoint.model_config import ModelConfig
from engine.roofline import Ceilings, Roof, Storage, Work, step_work
from engine.scheduling.plan import StepPlan

_NOTHING = Work(0.0, 0.0, 0.0)


class StepMeter:
    """See the module's text."""

    def __init__(self, config: ModelConfig, storage: Storage, ceilings: Ceilings | None) -> None:
        """``ceilings``: None where they are not known."""
        self._config = config
        self._storage = storage
        self._ceilings = ceilings
        self._work = _NOTHING
        self._seconds = 0.0

    def observe(self, plan: StepPlan, seconds: float) -> Work:
        """A step has ended, and took so long; what it did."""
        work = step_work(self._config, self._storage, plan.rows)
        self._work += work
        self._seconds += seconds
        return work

    def take(self) -> tuple[float, float] | None:
        """(MFU, MBU) of the steps since the last call, while they ran; zeros where there were none.

        None where the ceilings are not known.
        """
        work, seconds = self._work, self._seconds
        self._work, self._seconds = _NOTHING, 0.0
        if self._ceilings is None:
            return None
        if seconds <= 0.0:
            return 0.0, 0.0
        roof = Roof(work, self._ceilings, seconds)
        return roof.mfu, roof.mbu
