"""Keeps a worker's metrics up to date. Label sets are resolved once."""

from __future__ import annotations

from collections.abc import Mapping

from baton.metrics import WorkerMetrics
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler

_BLOCK_STATES = ("free", "used", "cached", "quarantined")


class WorkerGauges:
    """Written by the control loop; prometheus-client's own locks guard the readers."""

    def __init__(self, metrics: WorkerMetrics, worker: str, role: str) -> None:
        labels = {"worker": worker, "role": role}
        self._metrics = metrics
        self._labels = (worker, role)
        self._running = metrics.sequences.labels(**labels, state="running")
        self._waiting = metrics.sequences.labels(**labels, state="waiting")
        self._blocks = [metrics.kv_blocks.labels(**labels, state=state) for state in _BLOCK_STATES]
        self._fill = metrics.batch_fill_ratio.labels(**labels)
        self._computed = metrics.computed_prompt_tokens.labels(**labels)
        self._preemptions = metrics.preemptions.labels(**labels)
        self._queue = metrics.queue_seconds.labels(role=role)
        self._step = metrics.step_seconds.labels(**labels)
        self._drafted = metrics.drafted_tokens
        self._accepted = metrics.accepted_tokens
        self._preempted: int | None = None
        self._worker = worker
        self._known_pairs: set[tuple[str, str, str]] = set()
        self._staging = metrics.transfer_staging
        self._pairs = metrics.transfer_pairs
        self._in_flight = metrics.transfer_in_flight.labels(worker=worker)

    def retire(self) -> None:
        """The worker plays this role no longer: what it has now is shown under another one."""
        for state in ("running", "waiting"):
            self._metrics.sequences.remove(*self._labels, state)
        for state in _BLOCK_STATES:
            self._metrics.kv_blocks.remove(*self._labels, state)
        self._metrics.batch_fill_ratio.remove(*self._labels)

    def refresh(self, scheduler: Scheduler, pool: BlockPool) -> None:
        """Take over the counts of sequences and blocks."""
        self._running.set(len(scheduler.running) + len(scheduler.held))
        self._waiting.set(len(scheduler.waiting))
        counts = pool.counts()
        for state, gauge in zip(_BLOCK_STATES, self._blocks, strict=True):
            gauge.set(getattr(counts, state))
        if self._preempted is not None:
            self._preemptions.inc(scheduler.preemptions - self._preempted)
        self._preempted = scheduler.preemptions

    def transfers(
        self, pairs: Mapping[str, str], in_flight_bytes: int, staging: Mapping[str, int]
    ) -> None:
        """The transport to each receiver by its incarnation, and what is under way to all;

        ``staging`` is in bytes, by transport.
        """
        for transport, count in staging.items():
            self._staging.labels(worker=self._worker, transport=transport).set(count)
        labels = {
            (self._worker, incarnation.partition(":")[0], transport)
            for incarnation, transport in pairs.items()
        }
        for gone in self._known_pairs - labels:
            self._pairs.remove(*gone)
        for known in labels:
            self._pairs.labels(*known).set(1)
        self._known_pairs = labels
        self._in_flight.set(in_flight_bytes)

    def batch_fill(self, ratio: float) -> None:
        """The share of the most allowed sequences that a step has."""
        self._fill.set(ratio)

    def queued(self, seconds: float) -> None:
        """A sequence has waited this long for its first step."""
        self._queue.observe(seconds)

    def step(self, seconds: float, computed_prompt_tokens: int) -> None:
        """A step has ended."""
        self._step.observe(seconds)
        self._computed.inc(computed_prompt_tokens)

    def speculated(self, drafter: str, drafted: int, accepted: int) -> None:
        """A step has checked so many drafted tokens."""
        self._drafted.labels(drafter=drafter).inc(drafted)
        self._accepted.labels(drafter=drafter).inc(accepted)
