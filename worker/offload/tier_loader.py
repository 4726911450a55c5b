"""Brings blocks of a prompt back from the tiers, if that is predicted to beat computing them.

    (found) ─worth it, room→ loading: blocks are taken, the copies keep their slots;
    loading ─all read and verified→ cached, under their hashes;
    loading ─a damaged copy, a bad sector→ cached up to there; the copy is forgotten;

    loading ─takes too long→ given up: no request waits any more, and its blocks are free as soon as
        the read in flight has ended

A failed load costs time but never the request: the blocks are then computed. Owned by the event
loop; a thread of its own copies the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.errors import ChecksumMismatch
from baton.hashing import last_hashes
from baton.telemetry.worker_metrics import TierSeries
from engine.scheduling import sequence as engine_sequence
from engine.scheduling.block_tiers import BlockTiers, Found
from engine.scheduling.scheduler import Scheduler
from kvtransfer.memory.memory import BlockMemory
from worker.offload.tier_estimates import TierEstimates
from worker.offload.tier_storage import TierStorage
from worker.offload.tier_thread import TierThread

log = logging.getLogger(__name__)

_SHARE_OF_DEADLINE = 0.5
"""Maximum share of a request's remaining time that a load from the offload tiers may take."""
_RECALL_S = 10.0
"""Maximum seconds for which another worker's pull waits while this worker loads blocks from a
tier."""
_TURNS = 4
"""A request may have to wait for other loads of the same prompt's blocks. This is the maximum
number of loads for which it waits, one after another."""

ComputeSeconds = Callable[[int, int], float]
"""Predicts the seconds to compute tokens. Arguments: the number of tokens to compute, and the
number of tokens before them."""


@dataclass(slots=True)
class _Job:
    """Blocks that the thread loads, and its progress. The event loop reads the progress once the
    load has ended."""

    missing: list[Found]
    targets: list[int]
    """Numbers of the pool's blocks into which the blocks in ``missing`` are loaded, in the same
    order."""
    settled: asyncio.Future[None]
    """Future on which callers wait for the load. It is done once the load has ended or was given
    up."""
    loaded: int = 0
    bad: Found | None = None
    """The damaged copy at which the load ended; None if no copy was damaged. ``reason`` describes
    the damage."""
    reason: str = ""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that the thread has spent reading from each tier."""
    bytes: Counter[str] = field(default_factory=Counter)
    given_up: bool = False
    """Whether the load was given up: no caller waits for its remaining blocks. The event loop sets
    this field."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that is predicted to be faster than computing."""

    run: list[Found]
    sizes: Mapping[str, int]
    """Number of bytes to read, by tier."""
    limit_s: float
    """Seconds after which the load is given up."""


class TierLoader:
    """Loads blocks from the offload tiers into the pool."""

    def __init__(
        self,
        tiers: BlockTiers,
        storages: Mapping[str, TierStorage],
        memory: BlockMemory,
        thread: TierThread,
        *,
        scheduler: Scheduler,
        compute_s: ComputeSeconds,
        estimates: TierEstimates,
        series: Mapping[str, TierSeries],
    ) -> None:
        """``storages`` and ``series`` have one value for each tier's name. Other code must not use
        ``memory``."""
        self._tiers = tiers
        self._pool = tiers.pool
        self._storages = storages
        self._memory = memory
        self._thread = thread
        self._scheduler = scheduler
        self._compute_s = compute_s
        self.estimates = estimates
        self._series = series
        self._under_way: dict[bytes, asyncio.Future[None]] = {}
        """Loads in flight, by the hash of each block that they load. The value is the future
        ``settled`` of the load."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of loads that have not ended, including loads that were given up."""
        self._stuck = 0
        """Number of loads that were given up and have not ended yet."""
        self._ahead: Counter[str] = Counter()
        """Number of bytes that loads in flight still read from each tier."""

    @property
    def is_idle(self) -> bool:
        """Whether no block of the pool is being loaded from a tier."""
        return not self._tasks

    def return_s(self, tokens: int) -> float:
        """Predict the seconds to load the blocks of ``tokens`` tokens, if they are in the slowest
        tier."""
        size = -(-tokens // self._scheduler.limits.block_size) * self._memory.block_bytes
        return max(self.estimates.load_s({tier.name: size}) for tier in self._tiers.tiers)

    def returns_sooner(self, sequence: engine_sequence.Sequence) -> bool:
        """Whether this worker should keep a sequence that is about to be preempted: loading its
        blocks from the tiers is predicted to be faster.

        The alternative is that another worker of the same speed computes the blocks again.
        """
        full = sequence.registered * self._scheduler.limits.block_size
        if not full:
            return False
        rest = max(1, sequence.computed - full)
        here_s = self.return_s(full) + self._compute_s(rest, full)
        return here_s < self._compute_s(sequence.computed, 0)

    async def load(self, sequence: engine_sequence.Sequence, deadline: float) -> list[int]:
        """Load the first blocks of a sequence that is not queued yet.

        Returns the sequence's first cached blocks if any were loaded; the caller owns them. Returns
        an empty list if nothing was loaded, for any reason. ``deadline`` is the request's, in
        seconds of this worker's monotonic clock.
        """
        hashes = self._hashes(sequence)
        await self._wait_for_others(hashes, deadline)
        load = self._choose(hashes, deadline)
        if load is None:
            return []
        if not self._has_room(load, self._blocks_of(sequence) + self._line):
            self._count(load.sizes, "no_room")
            return []
        if not await self._run(load):
            return []
        blocks = self._pool.match(hashes)
        self._pool.pin(blocks)
        return blocks

    async def recall(self, hashes: Sequence[bytes]) -> None:
        """Load the leading blocks of these hashes so that another worker can pull them, if loading
        is faster than computing."""
        deadline = time.monotonic() + _RECALL_S
        await self._wait_for_others(hashes, deadline)
        load = self._choose(hashes, deadline)
        if load is not None and self._has_room(load, len(load.run) + self._line):
            await self._run(load)

    @property
    def _line(self) -> int:
        """Number of blocks that loads must leave free: those that queued sequences need, and the
        next block of each running sequence."""
        return self._scheduler.wanted_blocks + len(self._scheduler.running)

    def _blocks_of(self, sequence: engine_sequence.Sequence) -> int:
        return -(-sequence.target // self._scheduler.limits.block_size)

    def may_return(self, sequence: engine_sequence.Sequence) -> bool:
        """Whether ``bring_back`` has blocks to load for a preempted sequence."""
        return self._returning(sequence) is not None

    async def bring_back(self, sequence: engine_sequence.Sequence) -> None:
        """Load the blocks of a preempted sequence into the cache, if that is predicted to be faster
        than computing them."""
        load = self._returning(sequence)
        if load is not None:
            await self._run(load)

    def _returning(self, sequence: engine_sequence.Sequence) -> _Load | None:
        load = self._choose(self._hashes(sequence), sequence.deadline)
        # The sequence is the first in the queue: only running sequences come before it.
        needed = self._blocks_of(sequence) + len(self._scheduler.running)
        return load if load is not None and self._has_room(load, needed) else None

    def _hashes(self, sequence: engine_sequence.Sequence) -> list[bytes]:
        """Return the hashes of a sequence's blocks. The block with its last token is left out,
        because that token's logits are always needed.

        Returns an empty list if the prompt's own logprobs are wanted, since those need the logits
        of all tokens.
        """
        if sequence.scores_prompt:
            return []
        limits = self._scheduler.limits
        most = (len(sequence.token_ids) - 1) // limits.block_size
        hashes = last_hashes(sequence.full_hashes(limits.hash_block), limits.hashes_per_block)
        return hashes[:most]

    async def _wait_for_others(self, hashes: Sequence[bytes], deadline: float) -> None:
        for _ in range(_TURNS):
            other = next((self._under_way[d] for d in hashes if d in self._under_way), None)
            left = _SHARE_OF_DEADLINE * (deadline - time.monotonic())
            if other is None or left <= 0:
                return
            await asyncio.wait([other], timeout=left)

    def _choose(self, hashes: Sequence[bytes], deadline: float) -> _Load | None:
        """Choose which blocks to load for a prompt with these block hashes.

        Returns None if no block can be loaded, or if computing is predicted to be faster.
        """
        if self._stuck:
            # Another load would only take blocks, and wait behind the stuck one.
            return None
        run = self._tiers.find(hashes)
        blocks = Counter(found.tier.name for found in run if found.tier is not None)
        if not blocks or any(found.digest in self._under_way for found in run):
            return None
        sizes = {name: count * self._memory.block_bytes for name, count in blocks.items()}
        size = self._scheduler.limits.block_size
        first = next(index for index, found in enumerate(run) if found.tier is not None)
        compute_s = self._compute_s((len(run) - first) * size, first * size)
        # Loads in flight are read first.
        to_read = self._ahead + Counter(sizes)
        now = time.monotonic()
        if not self.estimates.pays(to_read, compute_s, now):
            return None
        limit_s = self.estimates.deadline_s(to_read, compute_s)
        if limit_s > _SHARE_OF_DEADLINE * (deadline - now):
            return None
        return _Load(run, sizes, limit_s)

    def _has_room(self, load: _Load, needed: int) -> bool:
        """Whether the pool has room for a prompt of ``needed`` blocks. The prompt's blocks that are
        cached already count as available."""
        held = [found.block for found in load.run if found.block is not None]
        return needed - len(held) <= self._pool.available - self._pool.evictable(held)

    async def _run(self, load: _Load) -> bool:
        """Run a load until it has ended or is given up. Returns whether at least a part of it
        arrived in time."""
        missing = [found for found in load.run if found.tier is not None]
        held = [found.block for found in load.run if found.block is not None]
        self._pool.pin(held)
        loop = asyncio.get_running_loop()
        job = _Job(missing, self._pool.allocate(len(missing)), loop.create_future())
        self._tiers.begin_load(missing)
        self._ahead.update(load.sizes)
        self._under_way.update(dict.fromkeys((found.digest for found in missing), job.settled))
        timer = loop.call_later(load.limit_s, self._give_up, load, job)
        # The copy ends by itself, even if its callers are cancelled.
        task = asyncio.create_task(self._copy(load, job, held, timer), name="tier-load")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait([job.settled])
        return job.loaded > 0 and not job.given_up

    def _settle(self, job: _Job) -> None:
        """Let the callers that wait for ``job`` continue; idempotent."""
        if job.settled.done():
            return
        job.settled.set_result(None)
        for found in job.missing:
            del self._under_way[found.digest]

    def _give_up(self, load: _Load, job: _Job) -> None:
        job.given_up = True
        self._stuck += 1
        self.estimates.failed(load.sizes, time.monotonic())
        self._count(load.sizes, "late")
        log.warning("KV blocks were not read within %.1f s: computing them instead", load.limit_s)
        self._settle(job)

    async def _copy(
        self, load: _Load, job: _Job, held: list[int], timer: asyncio.TimerHandle
    ) -> None:
        try:
            await self._thread.submit(partial(self._copy_all, job))
            self._register(job)
        finally:
            timer.cancel()
            self._stuck -= job.given_up
            bad = [] if job.bad is None else [job.bad.digest]
            self._tiers.end_load(job.missing, bad)
            self._ahead.subtract(load.sizes)
            # Releases in an order that lets the run's last block be evicted first.
            self._pool.release([*held, *job.targets])
            self._learn(load, job)
            self._settle(job)

    def _copy_all(self, job: _Job) -> None:
        """Read the blocks of a load one after another, until a block is damaged. Runs on the
        loader's thread."""
        slots: dict[str, list[int]] = {}
        for found in job.missing:
            assert found.tier is not None
            assert found.copy is not None
            slots.setdefault(found.tier.name, []).append(found.copy.slot)
        for name, expected in slots.items():
            self._storages[name].expect(expected)
        for found, target in zip(job.missing, job.targets, strict=True):
            if job.given_up:
                return
            if not self._copy_one(job, found, target):
                job.bad = found
                return
            job.loaded += 1

    def _copy_one(self, job: _Job, found: Found, target: int) -> bool:
        assert found.tier is not None
        assert found.copy is not None
        name, began = found.tier.name, time.monotonic()
        try:
            self._storages[name].load(found.copy.slot, partial(self._memory.write, target, 0))
        except (OSError, ChecksumMismatch) as error:
            job.reason = "checksum" if isinstance(error, ChecksumMismatch) else "read"
            return False
        job.seconds[name] += time.monotonic() - began
        job.bytes[name] += self._memory.block_bytes
        return True

    def _register(self, job: _Job) -> None:
        for found, target in zip(job.missing[: job.loaded], job.targets, strict=False):
            assert found.copy is not None
            # If a step has computed the block meanwhile, this copy is dropped.
            self._pool.register(target, found.digest, found.copy.leading)

    def _learn(self, load: _Load, job: _Job) -> None:
        for name, size in job.bytes.items():
            self.estimates.succeeded(name, size, job.seconds[name])
            self._series[name].loaded_bytes.inc(size)
            self._series[name].loaded_blocks.inc(size // self._memory.block_bytes)
        if job.bad is not None:
            assert job.bad.tier is not None
            name = job.bad.tier.name
            self.estimates.failed([name], time.monotonic())
            self._series[name].failures(job.reason).inc()
            log.warning("a KV block from tier %s is damaged: computing it instead", name)
        if not job.given_up:
            self._count(load.sizes, "ok" if job.loaded == len(job.missing) else "short")

    def _count(self, names: Mapping[str, int], outcome: str) -> None:
        for name in names:
            self._series[name].loads(outcome).inc()
