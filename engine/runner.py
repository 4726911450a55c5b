"""Runs step plans: the only code that the engine thread executes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from baton.compiled_grammars import CompiledGrammars
from baton.sampling_params import SamplingParams
from engine.cpu.decoder import CoreShare, CpuDecoder
from engine.cpu.sampler import cpu_sampler
from engine.grammar_rows import GrammarRows
from engine.kv_cache import KvCache
from engine.plan import NewSequence, PlanRow, StepPlan, StepResult
from engine.sampling import SampleRow, sample
from engine.speculation import DraftedRow, Speculation, kept_tokens, with_place
from engine.step import StepInput, StepModel

Ending = Callable[[], StepResult]


@dataclass(slots=True)
class _Known:
    """The engine's own copy of a sequence: its tokens run ahead of the control loop's by a step."""

    token_ids: list[int]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]


class ModelRunner:
    """Holds the model, the cache and the tokens of the sequences it was told of."""

    overlaps = False
    """Whether a step may be started before the one before it has ended."""

    def __init__(
        self,
        model: StepModel,
        cache: KvCache,
        device: torch.device,
        grammars: CompiledGrammars | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """Without ``grammars`` a sequence that has one fails; without ``speculation`` each gets one

        token a step.
        """
        self.model = model
        self.cache = cache
        self.device = device
        self._grammars = GrammarRows(grammars)
        self._sampler = cpu_sampler() if device.type == "cpu" else None
        self._sample = self._sampler.sample if self._sampler is not None else sample
        self._known: dict[int, _Known] = {}
        self._speculation = speculation

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Deterministic in the plan and what came before."""
        began = time.perf_counter()
        self._take_news(plan)
        rows = self._drafted(plan.rows)
        tokens = self._compute(rows)
        if self.device.type == "cuda":
            # A result says that the step's KV is there: transfers read it on another stream.
            torch.cuda.current_stream(self.device).synchronize()
        seconds = time.perf_counter() - began
        drafted = sum(len(row.draft) for row in rows)
        if self._speculation is not None and plan.decodes_only:
            self._speculation.observe(len(rows), drafted, seconds)
        accepted = sum(len(found) - 1 for found in tokens if found)
        failed = self._failed(plan.rows)
        return StepResult(plan.step, tokens, seconds, failed, drafted, accepted)

    def start(self, plan: StepPlan) -> Ending:
        """Begin a step; what is returned waits for its end, and may be called on another thread."""
        result = self.run(plan)
        return lambda: result

    @property
    def layers_done(self) -> int:
        """See ``StepModel``."""
        return self.model.layers_done

    def clear_progress(self) -> None:
        """See ``StepModel``."""
        self.model.clear_progress()

    def use_threads(self, threads: int) -> None:
        """How many threads the next steps take, where the model can change that between steps."""
        self.model.use_threads(threads)
        if self._sampler is not None:
            self._sampler.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, where the model can."""
        if isinstance(self.model, CpuDecoder):
            self.model.share_cores(share)

    @property
    def drafter(self) -> str:
        """The name of what drafts, as the configuration calls it."""
        return "none" if self._speculation is None else self._speculation.drafter

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's tokens."""
        del self._known[sequence_id]
        self._grammars.forget(sequence_id)
        if self._speculation is not None:
            self._speculation.forget(sequence_id)

    def _take_news(self, plan: StepPlan) -> None:
        for sequence_id in plan.dropped:
            self.forget(sequence_id)
        for new in plan.new:
            self._learn(new)

    def _learn(self, new: NewSequence) -> None:
        self._known[new.sequence_id] = _Known(
            list(new.token_ids), new.prompt_length, new.sampling, new.stop_ids
        )
        self._grammars.learn(new)

    def _failed(self, rows: tuple[PlanRow, ...]) -> tuple[tuple[int, str], ...]:
        """See ``StepResult.failed``."""
        found = ((place, self._grammars.failure(r.sequence_id)) for place, r in enumerate(rows))
        return tuple((place, why) for place, why in found if why)

    def _drafted(self, rows: Iterable[PlanRow]) -> list[DraftedRow]:
        """The rows as they are computed: where their sequences are by now, and with drafts."""
        placed = [DraftedRow(self._placed(row), ()) for row in rows]
        if self._speculation is None:
            return placed
        return self._speculation.extend(placed, lambda number: self._known[number].token_ids)

    def _placed(self, row: PlanRow) -> PlanRow:
        """See ``PlanRow``."""
        known = len(self._known[row.sequence_id].token_ids)
        if known < row.start + row.count:
            # This step was planned behind one that has failed, for a token that never came.
            raise RuntimeError("the step before this one failed")
        if row.count > 1 or not row.sample or row.start == known - 1:
            return row
        return with_place(row, known - 1, 1)

    def _compute(self, rows: Sequence[DraftedRow]) -> tuple[tuple[int, ...], ...]:
        step, draws = self._gather(rows)
        found = self.model.run(step)
        if found.best is not None:
            drawn = found.best
        else:
            assert found.logits is not None, "a step gives the one or the other"
            drawn = self._sample(found.logits, self._masked(rows, draws))
        return self._kept(rows, drawn)

    def _masked(self, rows: Sequence[DraftedRow], draws: list[SampleRow]) -> list[SampleRow]:
        """The draws with their grammars' masks."""
        numbers = [
            drafted.row.sequence_id
            for drafted in rows
            if drafted.row.sample
            for _ in range(len(drafted.draft) + 1)
        ]
        return self._grammars.masked(numbers, draws)

    def _gather(self, rows: Sequence[DraftedRow]) -> tuple[StepInput, list[SampleRow]]:
        """What the model is asked, and what each of its outputs is drawn with.

        The first draw's tokens of each row are the list that the runner keeps.
        """
        token_ids: list[int] = []
        outputs: list[int] = []
        draws: list[SampleRow] = []
        for drafted in rows:
            row, draft = drafted.row, drafted.draft
            known = self._known[row.sequence_id]
            token_ids += known.token_ids[row.start : row.start + row.count - len(draft)]
            token_ids += draft
            if row.sample:
                outputs += range(len(token_ids) - 1 - len(draft), len(token_ids))
                draws += _draws(known, draft)
        greedy = all(draw.plain and draw.sampling.greedy for draw in draws)
        rows_computed = tuple(drafted.row for drafted in rows)
        return StepInput(rows_computed, token_ids, outputs, greedy), draws

    def _kept(
        self, rows: Sequence[DraftedRow], drawn: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """The tokens of each row: of those drawn the ones whose draft was right before them.

        They are appended to the sequences.
        """
        at = 0
        tokens: list[tuple[int, ...]] = []
        for drafted in rows:
            row, draft = drafted.row, drafted.draft
            if not row.sample:
                tokens.append(())
                continue
            kept = kept_tokens(draft, drawn[at : at + len(draft)])
            found = tuple(drawn[at : at + kept + 1])
            at += len(draft) + 1
            self._known[row.sequence_id].token_ids.extend(found)
            if self._speculation is not None:
                self._speculation.verified(row.sequence_id, len(draft), kept)
            tokens.append(found)
        return tuple(tokens)


def _draws(known: _Known, draft: tuple[int, ...]) -> list[SampleRow]:
    """Of a sequence's next token, and of each behind a token of the draft as if it were right."""
    return [
        SampleRow(
            known.sampling,
            [*known.token_ids, *draft[:place]] if place else known.token_ids,
            known.prompt_length,
            known.stop_ids,
        )
        for place in range(len(draft) + 1)
    ]


def by_row(rows: tuple[PlanRow, ...], drawn: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each row: one for each that samples, in their order."""
    tokens = iter(drawn)
    return tuple((next(tokens),) if row.sample else () for row in rows)
