"""What a worker has measured of its steps, for its next life on the same machine, or for others.

To measure takes a second, in which a worker that was lost is still missing; the same engine on the
same machine costs the same, and what has changed is learned from the steps that follow. A file for
each owner and engine, which appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker.costs.step_costs import StepCosts


class KnownCosts:
    """Of one engine, in a folder of its machine."""

    def __init__(self, folder: Path, owner: str, engine: Sequence[Any]) -> None:
        """``engine`` is all that steps' costs depend on, as JSON can tell it.

        ``owner``: a slot that has a device of its own, or a name for the cores that workers share.
        """
        told = json.dumps(engine, sort_keys=True).encode()
        self._path = folder / f"{owner}-{hashlib.sha256(told).hexdigest()[:16]}.json"

    def read(self) -> StepCosts | None:
        """What is known; None where that is nothing, or cannot be read."""
        try:
            prefill, step = json.loads(self._path.read_bytes())
            return StepCosts(_coefficients(prefill), _coefficients(step))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, costs: StepCosts) -> None:
        """Remember them. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps([costs.prefill, costs.step]))
        draft.replace(self._path)


def _coefficients(told: Any) -> tuple[float, float, float]:
    a, b, c = (float(one) for one in told)
    return a, b, c
