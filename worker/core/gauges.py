"""A worker's metrics: counts of sequences and blocks, and how well steps use the device.

Label sets are resolved once for each role. Values are written on the event loop;
prometheus-client's own locks protect readers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager

from baton.store.redis_client import RedisCalls
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.checkpoint.model_config import ModelConfig
from engine.roofline import Ceilings, Roof, Storage, Work, step_work
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler

_BLOCK_STATES = ("free", "used", "cached", "quarantined")
_NO_WORK = Work(0.0, 0.0, 0.0)


class UtilizationMeter:
    """Compares the work of a worker's steps with its device's peak FLOPs and bandwidth.

    See ``engine/roofline.py``. Verified draft tokens do not count as work: they are a cost of the
    tokens that they bring. Plain Python.
    """

    def __init__(self, config: ModelConfig, storage: Storage, ceilings: Ceilings | None) -> None:
        """``ceilings`` are the device's peak FLOPs and bandwidth; None if they are not known."""
        self._config = config
        self._storage = storage
        self._ceilings = ceilings
        self._work = _NO_WORK
        self._seconds = 0.0

    def observe(self, plan: StepPlan, seconds: float) -> Work:
        """Add a step that took ``seconds``. Returns the step's FLOPs and bytes."""
        work = step_work(self._config, self._storage, plan.rows)
        self._work += work
        self._seconds += seconds
        return work

    def take(self) -> tuple[float, float] | None:
        """Return (MFU, MBU) of the steps since the last call; zeros if there were no steps.

        Idle time between steps does not count. Returns None if the device's peaks are not known.
        """
        work, seconds = self._work, self._seconds
        self._work, self._seconds = _NO_WORK, 0.0
        if self._ceilings is None:
            return None
        if seconds <= 0.0:
            return 0.0, 0.0
        roof = Roof(work, self._ceilings, seconds)
        return roof.mfu, roof.mbu


class WorkerGauges:
    """The metrics of one worker."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        worker: str,
        role: str,
        price_per_hour: float = 0.0,
        meter: UtilizationMeter | None = None,
    ) -> None:
        """``price_per_hour`` is the worker's price in any currency; 0 if not known.

        ``meter`` computes MFU and MBU. It is None for an engine without weights, whose steps have
        no known work.
        """
        self._metrics = metrics
        self._worker = worker
        self._price_per_hour = price_per_hour
        self._meter = meter
        self._preempted: int | None = None
        self._known_pairs: set[tuple[str, str, str]] = set()
        self._drafted = metrics.drafted_tokens
        self._accepted = metrics.accepted_tokens
        self._staging = metrics.transfer_staging
        self._pairs = metrics.transfer_pairs
        self._in_flight = metrics.transfer_in_flight.labels(worker=worker)
        self._label(role)

    def _label(self, role: str) -> None:
        metrics, worker = self._metrics, self._worker
        labels = {"worker": worker, "role": role}
        self._labels = (worker, role)
        self._running = metrics.sequences.labels(**labels, state="running")
        self._waiting = metrics.sequences.labels(**labels, state="waiting")
        self._blocks = [metrics.kv_blocks.labels(**labels, state=state) for state in _BLOCK_STATES]
        self._retained = metrics.retained_kv_blocks.labels(**labels)
        self._fill = metrics.batch_fill_ratio.labels(**labels)
        self._computed = metrics.computed_prompt_tokens.labels(**labels)
        self._preemptions = metrics.preemptions.labels(**labels)
        self._queue = metrics.queue_seconds.labels(role=role)
        self._step = metrics.step_seconds.labels(**labels)
        self._operations = metrics.model_operations.labels(**labels)
        self._memory_bytes = metrics.model_memory_bytes.labels(**labels)
        self._device_seconds = metrics.device_seconds.labels(**labels)
        self._device_used = metrics.device_memory_used_bytes.labels(**labels)
        self._device_total = metrics.device_memory_total_bytes.labels(**labels)
        self._out_of_memory = metrics.out_of_memory.labels(**labels)
        self._index_pending = metrics.index_pending_blocks.labels(**labels)
        self._index_lag = metrics.index_lag_seconds.labels(**labels)
        self._loop_lag = metrics.event_loop_lag_seconds.labels(role)
        self._registry_calls: RedisCalls = metrics.redis_calls(role, "registry_put")
        self._index_calls: RedisCalls = metrics.redis_calls(role, "index_publish")
        if self._price_per_hour:
            metrics.worker_price_per_hour.labels(**labels).set(self._price_per_hour)

    def change_role(self, role: str) -> None:
        """Report all metrics under another role from now on, and remove the current role's
        gauges."""
        self._retire()
        self._label(role)

    def _retire(self) -> None:
        for state in ("running", "waiting"):
            self._metrics.sequences.remove(*self._labels, state)
        for state in _BLOCK_STATES:
            self._metrics.kv_blocks.remove(*self._labels, state)
        metrics = self._metrics
        for gauge in (
            metrics.batch_fill_ratio,
            metrics.device_memory_used_bytes,
            metrics.device_memory_total_bytes,
            metrics.retained_kv_blocks,
            metrics.index_pending_blocks,
            metrics.index_lag_seconds,
            metrics.model_flops_utilization,
            metrics.model_bandwidth_utilization,
            metrics.worker_price_per_hour,
        ):
            # Some gauges exist only if the configuration has a peak or a price.
            with contextlib.suppress(KeyError):
                gauge.remove(*self._labels)

    def refresh(self, scheduler: Scheduler, pool: BlockPool) -> None:
        """Update the gauges that count sequences and blocks."""
        self._running.set(len(scheduler.running) + len(scheduler.held))
        self._waiting.set(len(scheduler.waiting))
        counts = pool.counts()
        for state, gauge in zip(_BLOCK_STATES, self._blocks, strict=True):
            gauge.set(getattr(counts, state))
        self._retained.set(len(pool.retained))
        if self._preempted is not None:
            self._preemptions.inc(scheduler.preemptions - self._preempted)
        self._preempted = scheduler.preemptions

    def transfers(
        self, pairs: Mapping[str, str], in_flight_bytes: int, staging: Mapping[str, int]
    ) -> None:
        """Update the gauges of pairs, of bytes in flight to all receivers, and of staging memory.

        ``pairs`` maps each receiver's incarnation to the name of its transport. ``staging`` has the
        bytes of staging memory by transport.
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
        """Record the number of sequences in a step as a share of the maximum."""
        self._fill.set(ratio)

    def queued(self, seconds: float) -> None:
        """Record how many seconds a sequence waited for its first step."""
        self._queue.observe(seconds)

    def step(self, plan: StepPlan, result: StepResult, computed_prompt_tokens: int) -> None:
        """Record the duration and the token counts of a step that has ended."""
        self._step.observe(result.seconds)
        self._computed.inc(computed_prompt_tokens)
        if self._meter is not None:
            work = self._meter.observe(plan, result.seconds)
            self._operations.inc(work.operations)
            self._memory_bytes.inc(work.bytes)

    def show_utilization(self) -> None:
        """Update the gauges of MFU and MBU from the steps since the last call. Does nothing if the
        device's peaks are not known.

        It must be called every ``heartbeat_s`` seconds.
        """
        found = None if self._meter is None else self._meter.take()
        if found is not None:
            mfu, mbu = found
            self._metrics.model_flops_utilization.labels(*self._labels).set(mfu)
            self._metrics.model_bandwidth_utilization.labels(*self._labels).set(mbu)

    def show_device(self, used_bytes: int, total_bytes: int, seconds: float) -> None:
        """Update the gauges of the device's memory.

        ``seconds`` is the time since the last call, multiplied by the number of devices.
        """
        self._device_used.set(used_bytes)
        self._device_total.set(total_bytes)
        self._device_seconds.inc(seconds)

    def out_of_memory(self) -> None:
        """Count a step that failed because the device or the host ran out of memory."""
        self._out_of_memory.inc()

    def registry_call(self) -> AbstractContextManager[None]:
        """Return a context manager that measures the duration of a registry call."""
        return self._registry_calls.one()

    def index_call(self) -> AbstractContextManager[None]:
        """Return a context manager that measures the duration of a prefix index call."""
        return self._index_calls.one()

    def index_published(self, pending_blocks: int, lag_s: float) -> None:
        """Update the gauges of the prefix index: how many blocks were not published yet, and for
        how many seconds some have been missing."""
        self._index_pending.set(pending_blocks)
        self._index_lag.set(lag_s)

    def loop_lag(self, seconds: float) -> None:
        """Record the event loop's lag in seconds."""
        self._loop_lag.observe(seconds)

    def speculated(self, drafter: str, drafted: int, accepted: int) -> None:
        """Record how many draft tokens a step verified and accepted. ``drafter`` is the name of the
        speculative method."""
        self._drafted.labels(drafter=drafter).inc(drafted)
        self._accepted.labels(drafter=drafter).inc(accepted)
