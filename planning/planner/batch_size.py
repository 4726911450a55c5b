"""The batch with which a cluster serves most within the p99 of its SLOs.

Larger batches bring more tokens per second and slower ones. Each pair of ``max_sequences`` of the
decode workers and ``chunk_tokens`` serves the busiest part of the traffic at a multiple of its
rate; the pair is best that keeps the SLOs of 99 % of the requests at the highest multiple. A pair
that does not serve more than the best one before it is simulated once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planning.planner.cluster_kind import ClusterKind, Counts, WorkerKind
from planning.planner.evaluation import Evaluation
from planning.planner.figures import Figures

MAX_MISSES = 0.01
"""Share of requests that may miss an SLO, be shed or fail: with less, its p99 is kept."""
STEP = 1.15
"""Ratio of neighboring multiples of the rate."""
_LOWEST, _HIGHEST = -12, 20
"""Steps: a fifth of the rate, and 16 times."""
_SEQUENCES = (16, 64, 256, 1024)
_CHUNKS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True, order=True)
class BatchSize:
    """What bounds the steps of workers."""

    max_sequences: int
    """Of a decode worker."""
    chunk_tokens: int
    """Of all workers."""

    def of(self, kind: ClusterKind) -> ClusterKind:
        """The same workers with these bounds."""
        chunk = self.chunk_tokens
        own = min(kind.prefill.profile.max_sequences, chunk)
        return replace(
            kind,
            prefill=_bounded(kind.prefill, own, chunk),
            decode=_bounded(kind.decode, self.max_sequences, max(chunk, self.max_sequences)),
        )


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A pair that was tried."""

    size: BatchSize
    rate: float
    """The highest multiple of the peak's rate that keeps the p99; 0: none that was tried."""
    figures: Figures | None
    """At that rate."""


@dataclass(frozen=True, slots=True)
class SizeSearch:
    """What was found."""

    best: SizeTrial
    own: SizeTrial
    """The pair of the workers' profile."""
    tried: int
    """Pairs."""


def best_size(evaluation: Evaluation, kind: ClusterKind, counts: Counts) -> SizeSearch:
    """Search for the workers of a plan."""
    profile = kind.decode.profile
    own_size = BatchSize(profile.max_sequences, kind.prefill.profile.chunk_tokens)

    def figures(size: BatchSize, step: int) -> Figures:
        # The workers' own pair is what the plan was found with.
        sized = kind if size == own_size else size.of(kind)
        return evaluation.figures_at(sized, counts, STEP**step)

    def keeps(size: BatchSize, step: int) -> bool:
        return _keeps(figures(size, step))

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


def _keeps(figures: Figures) -> bool:
    lost = (figures.shed + figures.failed) / figures.requests
    return max(figures.missed_ttft, figures.missed_tpot, lost) <= MAX_MISSES


def _highest(keeps: Callable[[int], bool]) -> int | None:
    """The highest step that keeps it, found from the peak's own rate on; None: there is none."""
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
