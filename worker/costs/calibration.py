"""Measures what an engine's steps cost, by running some before the worker serves.

These are real steps of the worker's own engine. Their blocks belong to no sequence and to no prefix
cache, and are released afterwards. About a second of steps is run. What remains uncertain is
learned from the steps that follow.

The workers of a host measure one after another, each with all the cores that its steps take when it
is alone. The cost of sharing the cores depends on the other workers' load. That, too, is learned
from the steps that follow.

The results are stored, and a worker that replaces a lost one reads them: the same engine on the
same machine costs the same. The store is a file for each owner and engine, which appears complete
or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from baton.sampling_params import SamplingParams
from engine.engine import Engine
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan, StepResult
from worker.costs.step_costs import Coefficients, StepCosts, fit

Run = Callable[[StepPlan], StepResult]
"""Runs a step on the engine, with the same number of CPU threads as steps in service."""

BUDGET_S = 0.4
"""Maximum seconds for measuring prompt chunks, and the same time again for measuring decode
steps."""
LONGEST_WAIT_S = 5.0
"""Maximum seconds for which a worker waits until other workers of its host have measured. After
that, they measure at the same time."""
_MIN_SHAPES = 3
"""Minimum number of step shapes to measure, however long they take: one per coefficient of the cost
model."""
_RUNS = 2
"""Number of runs of each step shape. The shortest time is used, because disturbances only make a
step slower."""
_CHUNKS = (
    (32, 0),
    (128, 0),
    (32, 512),
    (64, 256),
    (256, 0),
    (128, 1024),
    (512, 0),
    (512, 2048),
    (2048, 0),
    (2048, 6144),
    (8192, 0),
)
"""Shapes of measured prompt chunks: (prompt tokens in the step, tokens of the prompt computed
before)."""
_BATCHES = ((1, 32), (8, 32), (1, 1024), (4, 256), (16, 64), (8, 512), (32, 64), (64, 256))
"""Shapes of measured decode steps: (number of sequences, number of tokens that each sequence has
before the step)."""
_GREEDY = SamplingParams(temperature=0.0)


@contextlib.contextmanager
def alone(path: Path | None) -> Iterator[None]:
    """Let only one worker of the host measure at a time within this context.

    ``path`` is a lock file that the workers share. None means that the worker does not wait.
    """
    if path is None:
        yield
        return
    lock = FileLock(path)
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=LONGEST_WAIT_S)
    try:
        yield
    finally:
        lock.release()


def calibrate(engine: Engine, run: Run, budget_s: float = BUDGET_S) -> StepCosts:
    """Measure what the engine's steps cost, for about twice ``budget_s`` seconds.

    No other code may use the engine during the call.
    """
    chunks = [Shape(count, start, 1) for count, start in _CHUNKS]
    batches = [Shape(1, start, batch) for batch, start in _BATCHES]
    return StepCosts(
        _measure(engine, run, chunks, budget_s), _measure(engine, run, batches, budget_s)
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """A step to measure: ``batch`` sequences compute ``count`` tokens each, and each has ``start``
    tokens before them."""

    count: int
    start: int
    batch: int

    @property
    def point(self) -> tuple[float, float]:
        """The values of x and y in the cost formula ``a + b*x + c*y`` for this step: see
        ``StepCosts``."""
        if self.count == 1:
            return self.batch, self.batch * (self.start + 1)
        return self.count, self.count * (self.start + self.count / 2)

    def blocks(self, block_size: int) -> int:
        """Return the number of blocks that one of the step's sequences needs. With each run, a
        sequence that decodes gets one more token."""
        return -(-(self.start + self.count + _RUNS) // block_size)

    def fits(self, engine: Engine) -> bool:
        """Whether the engine's limits and its block pool allow a step of this shape."""
        limits = engine.scheduler.limits
        return (
            self.start + self.count + _RUNS < limits.context_length
            and self.batch <= limits.max_sequences
            and self.count <= limits.max_tokens(self.start)
            and self.batch * self.count <= limits.chunk_tokens
            and self.batch * self.blocks(limits.block_size) <= engine.pool.available
        )


def _measure(engine: Engine, run: Run, shapes: Sequence[Shape], budget_s: float) -> Coefficients:
    """Run as many steps of these shapes as the engine's limits and the time allow. Fit the cost
    coefficients to the measured times."""
    points: list[tuple[float, float]] = []
    ms: list[float] = []
    ends_at = time.monotonic() + budget_s
    for shape in shapes:
        if not shape.fits(engine):
            continue
        if len(points) >= _MIN_SHAPES:
            a, b, c = fit(points, ms)
            x, y = shape.point
            if time.monotonic() + _RUNS * (a + b * x + c * y) / 1e3 > ends_at:
                continue
        points.append(shape.point)
        ms.append(_time(engine, run, shape))
    return fit(points, ms)


def _time(engine: Engine, run: Run, shape: Shape) -> float:
    """Run a step of this shape, and return its milliseconds."""
    each = shape.blocks(engine.scheduler.limits.block_size)
    blocks = engine.pool.allocate(shape.batch * each)
    tables = [tuple(blocks[n * each : (n + 1) * each]) for n in range(shape.batch)]
    length = shape.start + shape.count
    new = tuple(NewSequence(n, (0,) * length, length, _GREEDY, ()) for n in range(shape.batch))
    decodes = shape.count == 1
    try:
        took = []
        for number in range(_RUNS):
            # A decode step leaves a token for the next run; a chunk is computed again.
            start = shape.start + number if decodes else shape.start
            rows = tuple(
                PlanRow(n, start, shape.count, tables[n], decodes) for n in range(shape.batch)
            )
            took.append(run(StepPlan(0, () if number else new, (), rows)).seconds)
        for n in range(shape.batch):
            engine.runner.forget(n)
    finally:
        engine.pool.release(blocks)
    return max(min(took), 1e-6) * 1e3


class CostCache:
    """Reads and stores the step costs of one engine, in a folder of its machine."""

    def __init__(self, folder: Path, owner: str, engine: Sequence[Any]) -> None:
        """``engine`` lists all values on which the costs of steps depend, as JSON values.

        ``owner`` is a slot with a device of its own, or a name for the CPU cores that several
        workers share.
        """
        key = json.dumps(engine, sort_keys=True).encode()
        self._path = folder / f"{owner}-{hashlib.sha256(key).hexdigest()[:16]}.json"

    def read(self) -> StepCosts | None:
        """Return the stored costs; None if there are none, or they cannot be read."""
        try:
            prefill, step = json.loads(self._path.read_bytes())
            return StepCosts(_coefficients(prefill), _coefficients(step))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, costs: StepCosts) -> None:
        """Store the step costs in the folder. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps([costs.prefill, costs.step]))
        draft.replace(self._path)


def _coefficients(stored: Any) -> tuple[float, float, float]:
    a, b, c = (float(one) for one in stored)
    return a, b, c
