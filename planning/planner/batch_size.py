"""Finds the batch size with the highest rate within the p99 of the SLOs.

Larger batches give more tokens per second and slower ones. Each pair of ``max_sequences`` of the
decode workers and ``chunk_tokens`` serves the busiest part of the traffic at multiples of its rate.
The best pair meets the SLOs of 99 % of the requests at the highest multiple. Requests that even an
idle worker would serve late do not count: no batch size helps them. A pair that cannot beat the
best one so far is simulated once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planning.planner.cluster_kind import ClusterKind, Counts, WorkerKind
from planning.planner.evaluation import Evaluation
from planning.planner.lower_bound import timely_answers, timely_prompts
from planning.planner.plan import BatchSize, Figures, SizeSearch, SizeTrial

MAX_MISSES = 0.01
"""Maximum share of requests that may miss an SLO, among those that an idle worker serves in time.
Also the maximum share of all requests that may be shed or fail."""
STEP = 1.15
"""Ratio between neighboring multiples of the traffic's rate in the search."""
_ROUNDING = 1e-9
_LOWEST, _HIGHEST = -12, 20
"""Lowest and highest step of the search. Step n is the rate times ``STEP`` to the power of n: from
a fifth of the rate to 16 times the rate."""
_SEQUENCES = (16, 64, 256, 1024)
_CHUNKS = (512, 2048, 8192)


def with_size(kind: ClusterKind, size: BatchSize) -> ClusterKind:
    """Return the cluster kind with the step limits of the batch size ``size``."""
    chunk = size.chunk_tokens
    own = min(kind.prefill.profile.max_sequences, chunk)
    return replace(
        kind,
        prefill=_bounded(kind.prefill, own, chunk),
        decode=_bounded(kind.decode, size.max_sequences, max(chunk, size.max_sequences)),
    )


def best_size(evaluation: Evaluation, kind: ClusterKind, counts: Counts) -> SizeSearch:
    """Search the best batch size for the workers of a plan."""
    profile = kind.decode.profile
    own_size = BatchSize(profile.max_sequences, kind.prefill.profile.chunk_tokens)
    config, peaks = evaluation.config, evaluation.traffic["peak"]
    prompts = min(timely_prompts(kind.prefill.profile, one, config) for one in peaks)
    answers = min(timely_answers(profile, one, config) for one in peaks)

    def figures(size: BatchSize, step: int) -> Figures:
        # The plan was found with the workers' own pair.
        sized = kind if size == own_size else with_size(kind, size)
        return evaluation.figures_at(sized, counts, STEP**step)

    def keeps(size: BatchSize, step: int) -> bool:
        return _keeps(figures(size, step), prompts, answers)

    def trial(size: BatchSize, step: int | None) -> SizeTrial:
        if step is None:
            return SizeTrial(size, 0.0, None)
        return SizeTrial(size, STEP**step, figures(size, step))

    step = _highest(lambda one: keeps(own_size, one))
    own = trial(own_size, step)
    best = own
    sizes = [BatchSize(sequences, chunk) for sequences in _SEQUENCES for chunk in _CHUNKS]
    others = [size for size in sizes if size != own_size]
    for size in others:
        first = _LOWEST if step is None else step + 1
        if first > _HIGHEST or not keeps(size, first):
            continue
        step = first
        while step < _HIGHEST and keeps(size, step + 1):
            step += 1
        best = trial(size, step)
    return SizeSearch(best, own, 1 + len(others))


def _bounded(worker: WorkerKind, max_sequences: int, chunk_tokens: int) -> WorkerKind:
    profile = replace(worker.profile, max_sequences=max_sequences, chunk_tokens=chunk_tokens)
    return replace(worker, profile=profile)


def _keeps(figures: Figures, prompts: float, answers: float) -> bool:
    """Return whether 99 % of the requests that an idle worker can serve in time meet the SLOs, by
    these figures.

    ``prompts`` is the share of requests whose TTFT an idle worker can meet. ``answers`` is the
    share whose TPOT it can meet.
    """
    lost = (figures.shed + figures.failed) / figures.requests
    prompts_kept = figures.missed_ttft <= 1 - (1 - MAX_MISSES) * prompts + _ROUNDING
    answers_kept = figures.missed_tpot <= 1 - (1 - MAX_MISSES) * answers + _ROUNDING
    return prompts_kept and answers_kept and lost <= MAX_MISSES


def _highest(keeps: Callable[[int], bool]) -> int | None:
    """Return the highest step of the rate for which ``keeps`` is true; None if there is none. The
    search begins at step 0, the rate of the traffic's peak."""
    step = 0
    if keeps(step):
        while step < _HIGHEST and keeps(step + 1):
            step += 1
        return step
    while step > _LOWEST:
        step -= 1
        if keeps(step):
            return step
    return None
