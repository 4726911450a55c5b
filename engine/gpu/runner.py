"""Runs step plans on a GPU: a step is started while the one before it still runs.

The token that a running step draws is named by where it will lie on the GPU (-1 - n) until the step
has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from baton.compiled_grammars import CompiledGrammars
from engine.gpu.decoder import GpuStepModel, StartedStep
from engine.gpu.draws import draw_of
from engine.grammar_state import Mask
from engine.kv_cache import KvCache
from engine.plan import StepPlan, StepResult
from engine.runner import Ending, ModelRunner, plan_rows, result_of, step_of
from engine.sampling import SampleRow
from engine.speculation import DraftedRow
from engine.step_work import StepFound, by_row


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A step whose tokens the sequences have by name only: each list, and the place in it."""

    step: StartedStep
    places: tuple[tuple[list[int], int], ...]


class GpuRunner(ModelRunner):
    """At most two steps run at a time: the results of those before must have been asked for.

    It drafts nothing: a draft needs the tokens of the step before, and would wait for it.
    """

    overlaps = True

    def __init__(
        self,
        model: GpuStepModel,
        cache: KvCache,
        device: torch.device,
        grammars: CompiledGrammars | None = None,
    ) -> None:
        super().__init__(model, cache, device, grammars)
        self._gpu = model
        self._unsettled: list[_Unsettled] = []
        self._last_end = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and wait for its end."""
        return self.start(plan)()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Ending:
        """Begin a step. Waits for the one before where a draw needs its tokens on the host, and

        where more than one token of each row of logits is wanted.
        """
        began = time.perf_counter()
        self._settle(running=1)
        self._take_news(plan)
        follows = any(self._grammars.has(row.sequence_id) for row in plan.rows)
        if follows:
            # A grammar goes by the tokens themselves.
            self._settle(running=0)
        rows = self._drafted(plan.rows)
        work = self._gather(rows)
        if not work.on_device:
            self._settle(running=0)
            found = self._compute(rows)
            if self.device.type == "cuda":
                # A result says that the step's KV is there: transfers read it on another stream.
                torch.cuda.current_stream(self.device).synchronize()
            result = self._finished(plan, began, found, self._failed(plan.rows))
            return lambda: result
        masks = partial(self._masks, rows, work.draws) if follows else None
        step = step_of(plan_rows(rows), work)
        started = self._gpu.start(step, [draw_of(draw) for draw in work.draws], masks)
        self._unsettled.append(_Unsettled(started, _named(work.draws)))
        failed = self._failed(plan.rows)

        def ending() -> StepResult:
            tokens = tuple(by_row(plan.rows, started.token_ids()))
            return self._finished(plan, began, StepFound(tokens), failed)

        return ending

    def _masks(self, rows: list[DraftedRow], draws: list[SampleRow]) -> dict[int, Mask]:
        """See ``engine.gpu.decoder.Masks``."""
        masked = enumerate(self._masked(rows, draws))
        return {number: draw.mask for number, draw in masked if draw.mask is not None}

    def capture(self) -> None:
        """Capture the decode steps of the usual sizes; see ``GpuStepModel.warm_up``."""
        self._gpu.warm_up()

    def _finished(
        self,
        plan: StepPlan,
        began: float,
        found: StepFound,
        failed: tuple[tuple[int, str], ...],
    ) -> StepResult:
        ended = time.perf_counter()
        # While the step before ran, this one only waited.
        seconds = ended - max(began, self._last_end)
        self._last_end = ended
        return result_of(plan, found, seconds, failed)

    def _settle(self, running: int) -> None:
        """Give tokens their ids, but for those of the last ``running`` steps."""
        while len(self._unsettled) > running:
            unsettled = self._unsettled.pop(0)
            token_ids = unsettled.step.token_ids()
            for (sequence, place), token in zip(unsettled.places, token_ids, strict=True):
                sequence[place] = token


def _named(draws: list[SampleRow]) -> tuple[tuple[list[int], int], ...]:
    """Append to each sequence the name of its drawn token; where they were put."""
    for number, draw in enumerate(draws):
        draw.token_ids.append(-1 - number)
    return tuple((draw.token_ids, len(draw.token_ids) - 1) for draw in draws)
