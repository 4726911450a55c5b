"""The router's table of workers: one row each, in columns, so that a decision is a few vector sums.

A row's load combines the worker's last snapshot with the load that this router has sent it since
then. Names are incarnations; updates of unlisted ones are ignored. Times are milliseconds on the
router's clock; blocks are those of the prefix index. No I/O, no clock; owned by the router's event
loop.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from baton.request import Geometry, LoadSnapshot
from baton.store.held_blocks import MAX_NUMBERS, held_by
from baton.store.registry import WorkerRecord
from router.routing.cost_model import (
    PREFILL_DEFAULT,
    Coefficients,
    CostModel,
    prefill_model,
    step_model,
)

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

HALF_LIFE_MS = 60_000.0
"""Half-life in milliseconds with which the recorded work of a worker decays."""
_LONGEST_EXPONENT = 256.0
_LATE_CREDIT = 0.9
"""Maximum fraction of a prompt in computation that counts as done before its first token arrives.
So a worker that hangs does not look idle."""
_STEP_EVERY_MS = 200.0
"""Minimum time between two observations of a worker's steps: snapshots come with every step."""
_STEP_EVERY_MS_PER_WORKER = 0.2
"""The same for each worker in the table. So learning never takes more than about a twentieth of a
core, and with 10,000 workers each is observed every two seconds."""
_FIRST_CAPACITY = 8
_GROWTH = 1.25
_NO_ROWS = np.empty(0, np.intp)
"""Factor by which a full table grows. Free rows cost a decision as much as workers."""


def hash_of(name: str) -> int:
    """Return a 64-bit hash of ``name`` that is equal in every process."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class PoolFilter:
    """Selects the pools whose workers may serve a context-length class in one role."""

    only: frozenset[str] | None = None
    """The only pools that may serve the class; None means every pool except those in ``never``."""
    never: frozenset[str] = frozenset()
    """Pools that may not serve the class, since only other classes may use them."""
    without: frozenset[str] = frozenset()
    """Incarnations of workers that are excluded, whatever their pool."""

    def allows(self, pool: str) -> bool:
        """Return whether the workers of ``pool`` may serve the class."""
        return pool in self.only if self.only is not None else pool not in self.never


EVERY_POOL = PoolFilter()


@dataclass(frozen=True, slots=True)
class Group:
    """The workers of one role that are up and that a class may use."""

    rows: Rows
    """Table rows of the group's workers, in ascending order."""
    closed: Floats
    """For each row of the table: 0 if the worker is in the group, otherwise infinity."""
    share: Floats
    """For each row of the table: 1 / (size of the group) if the worker is in the group, otherwise
    0."""

    def __len__(self) -> int:
        return len(self.rows)

    def mean(self, column: Floats) -> float:
        """Return the mean of a column of the table over the group's workers."""
        # No ``@``: BLAS starts threads for long columns, which costs more than the sum.
        return float((column * self.share).sum())


class _RowNumbers(dict[str, int]):
    """Row numbers by incarnation. Indexing with an unknown name gives the last row; ``get`` gives
    None.
    """

    def __missing__(self, name: str) -> int:
        return -1


@dataclass(slots=True)
class _Worker:
    """The data of a worker in the table that are not numbers."""

    pool: str
    kv_group: str
    prefill_cost: Coefficients
    step_cost: Coefficients
    """Calibrated coefficients, with which the learned costs begin."""
    device: str = ""
    """The GPU on which the worker takes turns with others that have the same, or the host if it
    does so on CPU cores; empty if it shares neither."""
    role: str = ""
    load: LoadSnapshot | None = None
    prefill: CostModel | None = None
    step: CostModel | None = None
    """Learned costs; None until a cost is observed."""


@dataclass(frozen=True, slots=True)
class LoadColumns:
    """The load snapshots of several workers, as columns with one number per worker."""

    names: Sequence[str]
    """Incarnations of the workers."""
    loads: Sequence[LoadSnapshot]
    running: Floats
    waiting: Floats
    waiting_tokens: Floats
    blocks: Floats
    """Number of blocks of each worker's own size that are free or that only its cache uses."""
    context_tokens: Floats

    @staticmethod
    def of(loads: Mapping[str, LoadSnapshot]) -> LoadColumns:
        """Return the columns of snapshots by incarnation."""
        each = list(loads.values())

        def column(values: Iterable[int]) -> Floats:
            return np.fromiter(values, np.float64, len(each))

        return LoadColumns(
            list(loads),
            each,
            column(load.running for load in each),
            column(load.waiting for load in each),
            column(load.waiting_tokens for load in each),
            column(load.free_blocks + load.cached_blocks for load in each),
            column(load.context_tokens for load in each),
        )


@cache
def _kv_shape(geometry: Geometry) -> Geometry:
    """Return the part of ``geometry`` that must be equal for one worker to pull KV from another:
    the number of ranks does not matter."""
    return geometry if geometry.drafter else replace(geometry, tensor_parallel=1)


@cache
def _first_prefill(begin: Coefficients) -> Coefficients:
    return prefill_model(begin).coefficients


@cache
def _first_step(begin: Coefficients) -> Coefficients:
    return step_model(begin).coefficients


class WorkerTable:
    """All workers that a router knows, one row each. Other code may read the columns, but not
    change them.
    """

    def __init__(self, hash_block: int = 16) -> None:
        """Create an empty table. ``hash_block``: number of tokens in a block of the prefix
        index.
        """
        self.hash_block = hash_block
        self._rows = _RowNumbers()
        self._workers: dict[int, _Worker] = {}
        self._shapes: dict[Geometry, int] = {}
        self._groups: dict[tuple[str, PoolFilter, str | None], Group] = {}
        self._apart: dict[tuple[PoolFilter, PoolFilter, str], Group] = {}
        self._index_names: Mapping[int, str] = {}
        self._index_rows: Rows | None = None
        """Rows of the worker numbers of ``_index_names``; None after a worker came or left."""
        self._epoch_ms = 0.0
        self._coarse = False
        self._has_placed = False
        """Whether a worker ever got a prompt or a sequence."""
        self.names: list[str] = []
        """Incarnation of the worker in each row; empty for a free row."""
        self._capacity = 0
        self._allocate(_FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        # The last row belongs to no worker. It absorbs updates of unknown workers.
        old = self._capacity

        def column(name: str, fill: float = 0.0) -> Floats:
            grown = np.full(capacity, fill)
            if old:
                grown[: old - 1] = getattr(self, name)[: old - 1]
            return grown

        # The costs of the last row are nonzero because they are divisors.
        self.prefill_a, self.prefill_b = column("prefill_a", 1.0), column("prefill_b", 1.0)
        self.prefill_c = column("prefill_c")
        self.step_a, self.step_b, self.step_c = column("step_a"), column("step_b"), column("step_c")
        self.own_until, self.own_floor = column("own_until"), column("own_floor")
        self.others_until = column("others_until")
        self.own_ms, self.outstanding = column("own_ms"), column("outstanding")
        self.work = column("work")
        self.placed = column("placed")
        self.sequences, self.max_sequences = column("sequences"), column("max_sequences", 1.0)
        self.running, self.reported_sequences = column("running"), column("reported_sequences")
        self.own_sequences = column("own_sequences")
        self.context_tokens = column("context_tokens")
        self.reported_context, self.own_context = column("reported_context"), column("own_context")
        self.available_blocks, self.reported_blocks = (
            column("available_blocks"),
            column("reported_blocks"),
        )
        self.promised_blocks = column("promised_blocks")
        self.refusals = column("refusals")
        self.per_block = column("per_block", 1.0)
        self.shape = column("shape", -1.0)
        self.stepped_at = column("stepped_at", -math.inf)
        self.up = column("up")
        self.lends = column("lends")
        hashes = np.zeros(capacity, dtype=np.uint64)
        if old:
            hashes[: old - 1] = self.slot_hash[: old - 1]
        self.slot_hash: npt.NDArray[np.uint64] = hashes
        self.names.extend([""] * (capacity - len(self.names)))
        self._free = [row for row in range(capacity - 2, -1, -1) if not self.names[row]]
        self._capacity = capacity
        self._forget_groups()

    # Which workers there are

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def row(self, name: str) -> int | None:
        """Return the row number of a worker, by which columns are read; None if the worker is not
        listed."""
        return self._rows.get(name)

    def incarnations(self) -> list[str]:
        """Return the incarnations of all listed workers."""
        return list(self._rows)

    def add(self, record: WorkerRecord) -> None:
        """Add a worker, as idle and not up yet. A worker that is already listed keeps its row and
        its load."""
        row = self._rows.get(record.incarnation)
        if row is None:
            row = self._new_row(record)
        worker = self._workers[row]
        if worker.role != record.role:
            # Start at the mean of the role: a new worker must not get every request.
            if self._has_placed:
                same = [r for r, other in self._workers.items() if other.role == record.role]
                self.work[row] = float(self.work[same].mean()) if same else 0.0
                self.placed[row] = float(self.placed[same].min()) if same else 0.0
            worker.role = record.role
            self._forget_groups()
        self.max_sequences[row] = max(1, record.max_sequences)

    def _new_row(self, record: WorkerRecord) -> int:
        if not self._free:
            self._allocate(max(self._capacity + 8, int(self._capacity * _GROWTH)))
        row = self._free.pop()
        self._rows[record.incarnation] = row
        self._index_rows = None
        self.names[row] = record.incarnation
        self._workers[row] = _Worker(
            record.pool or record.slot.rpartition("-")[0],
            record.kv_group,
            record.prefill_cost,
            record.step_cost,
            record.gpu or (record.address.rpartition(":")[0] if record.shares_cores else ""),
        )
        self.slot_hash[row] = hash_of(record.slot)
        shape = _kv_shape(record.geometry)
        self.shape[row] = self._shapes.setdefault(shape, len(self._shapes))
        self.per_block[row] = max(1, record.geometry.block_size // self.hash_block)
        self._coarse = self._coarse or self.per_block[row] > 1
        self._set_prefill(row, _first_prefill(record.prefill_cost))
        self._set_step(row, _first_step(record.step_cost))
        return row

    def remove(self, name: str) -> None:
        """Remove a worker; idempotent."""
        row = self._rows.pop(name, None)
        if row is None:
            return
        self.names[row] = ""
        self._free.append(row)
        self._index_rows = None
        del self._workers[row]
        for column in (
            self.own_until,
            self.own_floor,
            self.others_until,
            self.own_ms,
            self.outstanding,
            self.work,
            self.placed,
            self.sequences,
            self.running,
            self.reported_sequences,
            self.own_sequences,
            self.context_tokens,
            self.reported_context,
            self.own_context,
            self.available_blocks,
            self.reported_blocks,
            self.promised_blocks,
            self.refusals,
            self.up,
            self.lends,
        ):
            column[row] = 0.0
        self.stepped_at[row] = -math.inf
        self._forget_groups()

    def set_up(self, name: str, up: bool, *, lends: bool | None = None) -> None:
        """Set whether new requests may go to a worker.

        ``lends``: whether other workers may fetch the worker's blocks, which is also allowed while
        it drains. None means the same value as ``up``."""
        row = self._rows.get(name)
        if row is None:
            return
        self.lends[row] = float(up if lends is None else lends)
        if bool(self.up[row]) != up:
            self.up[row] = float(up)
            self._forget_groups()

    def group(self, role: str, pools: PoolFilter = EVERY_POOL, kv_group: str | None = "") -> Group:
        """Return the workers of a role and a KV group (None: of all) that are up and in one of
        ``pools``. The result is cached until a worker joins, leaves or changes.
        """
        found = self._groups.get((role, pools, kv_group))
        if found is None:
            rows = [
                row
                for row, worker in self._workers.items()
                if worker.role == role and kv_group in (None, worker.kv_group)
                if self.up[row] and pools.allows(worker.pool)
                if self.names[row] not in pools.without
            ]
            found = self._groups[role, pools, kv_group] = self._group(rows)
        return found

    def prefill_apart(self, prefill: PoolFilter, decode: PoolFilter, kv_group: str = "") -> Group:
        """Return the prefill workers of a KV group that share neither CPU cores nor a GPU with a
        decode worker that may serve the same request. The result is cached like that of
        ``group``."""
        found = self._apart.get((prefill, decode, kv_group))
        if found is None:
            decoding = self.group("decode", decode, kv_group)
            taken = {self._workers[row].device for row in decoding.rows} - {""}
            every = self.group("prefill", prefill, kv_group)
            rows = [row for row in every.rows.tolist() if self._workers[row].device not in taken]
            found = every if len(rows) == len(every) else self._group(rows)
            self._apart[prefill, decode, kv_group] = found
        return found

    def one_of(self, group: Group, name: str) -> Group:
        """Return the group of one worker of ``group``; ``group`` itself if the worker is not in
        it."""
        row = self._rows.get(name)
        return self._group([row]) if row is not None and row in group.rows else group

    def _group(self, rows: list[int]) -> Group:
        members = np.array(sorted(rows), dtype=np.intp)
        closed, share = np.full(self._capacity, np.inf), np.zeros(self._capacity)
        closed[members] = 0.0
        share[members] = 1.0 / max(1, len(members))
        return Group(members, closed, share)

    def _forget_groups(self) -> None:
        self._groups.clear()
        self._apart.clear()

    def prefill_cost(self, role: str) -> Coefficients:
        """Return the mean coefficients of the prefill costs of a role's workers that are up; the
        default ones if the role has none."""
        rows = [row for row, one in self._workers.items() if one.role == role and self.up[row]]
        if not rows:
            return PREFILL_DEFAULT
        a, b, c = self.prefill_a[rows], self.prefill_b[rows], self.prefill_c[rows]
        return float(a.mean()), float(b.mean()), float(c.mean())

    # Load reported by workers

    def set_load(self, name: str, load: LoadSnapshot, now_ms: float) -> None:
        """Apply a worker's load snapshot. A snapshot that was already applied changes nothing."""
        self.set_loads(LoadColumns.of({name: load}), now_ms)

    def set_loads(self, loads: LoadColumns, now_ms: float) -> None:
        """Apply the load snapshots of several workers, as ``set_load`` does for one."""
        rows = np.fromiter(map(self._rows.__getitem__, loads.names), np.intp, len(loads.names))
        others_until = self.prefill_a[rows] * loads.waiting
        others_until += self.prefill_b[rows] * loads.waiting_tokens
        others_until *= loads.waiting > 0
        own_left = np.maximum(self.own_until[rows] - now_ms, self.own_floor[rows])
        others_until -= np.maximum(own_left, 0.0)
        # The work of other routers. Our own promises are more accurate than any snapshot.
        others_until = now_ms + np.maximum(others_until, 0.0)
        each = rows.tolist()
        for place in np.flatnonzero(loads.waiting).tolist():
            worker = self._workers.get(each[place])
            if worker is not None and worker.load == loads.loads[place]:
                # Nothing has changed since, so its queue is not longer than it was predicted then.
                others_until[place] = self.others_until[rows[place]]
        self.others_until[rows] = others_until
        self.reported_sequences[rows] = loads.running + loads.waiting
        self.running[rows] = loads.running
        self.reported_context[rows] = loads.context_tokens
        self.reported_blocks[rows] = loads.blocks * self.per_block[rows]
        for row, load in zip(each, loads.loads, strict=True):
            if (worker := self._workers.get(row)) is not None:
                worker.load = load
        every_ms = max(_STEP_EVERY_MS, _STEP_EVERY_MS_PER_WORKER * len(self))
        for place in np.flatnonzero(self.stepped_at[rows] <= now_ms - every_ms).tolist():
            self._learn_step(each[place], loads.loads[place], now_ms)
        self._sum_up(rows)

    def set_refusals(self, name: str, refusals: int) -> None:
        """Set how many requests of this router wait for room at a decode worker that has refused
        them. While there are any, the worker has no room for others."""
        row = self._rows.get(name)
        if row is not None:
            self.refusals[row] = float(refusals)

    def _sum_up(self, rows: Rows) -> None:
        self.sequences[rows] = np.maximum(self.reported_sequences[rows], self.own_sequences[rows])
        self.context_tokens[rows] = np.maximum(self.reported_context[rows], self.own_context[rows])
        self.available_blocks[rows] = self.reported_blocks[rows] - self.promised_blocks[rows]

    # What this router promises

    def promise_prompt(self, name: str, prefill_ms: float, now_ms: float) -> None:
        """Record that this router sent a worker a prompt. The worker is predicted to compute it in
        ``prefill_ms`` milliseconds."""
        row = self._rows.get(name)
        if row is None:
            return
        self.own_until[row] = max(self.own_until[row], now_ms) + prefill_ms
        self.own_ms[row] += prefill_ms
        self.outstanding[row] += 1
        # Prompts of decode workers are counted as sequences.
        self.placed[row] += self._workers[row].role == "prefill"
        self._has_placed = True
        self.work[row] += prefill_ms * 2.0 ** self._exponent(now_ms)
        self._set_floor(row)

    def prompt_computed(self, name: str, prefill_ms: float, now_ms: float) -> None:
        """Record that a prompt of this router is computed: its first token has arrived, or cannot
        arrive any more.
        """
        row = self._rows.get(name)
        if row is None or not self.outstanding[row]:
            return
        self.outstanding[row] -= 1
        left = max(0.0, self.own_ms[row] - prefill_ms) if self.outstanding[row] else 0.0
        self.own_ms[row] = left
        self.own_until[row] = now_ms + left
        self._set_floor(row)

    def _set_floor(self, row: int) -> None:
        count = self.outstanding[row]
        self.own_floor[row] = self.own_ms[row] * (1 - _LATE_CREDIT / count) if count else 0.0

    def promise_sequence(
        self, name: str, prompt_tokens: int, blocks: int, choices: int = 1
    ) -> None:
        """Record that this router placed a sequence at a decode worker. The sequence needs
        ``blocks`` blocks that are not allocated yet.

        If ``choices`` is above 1, each choice counts as a sequence over the whole prompt."""
        self._change_sequence(name, choices, prompt_tokens * choices, blocks)

    def sequence_settled(self, name: str, blocks: int) -> None:
        """Record that the worker has allocated ``blocks`` blocks for a sequence, so that its next
        snapshot includes them."""
        self._change_sequence(name, 0, 0, -blocks)

    def sequence_ended(self, name: str, prompt_tokens: int, choices: int = 1) -> None:
        """Record that a sequence of this router, with all its choices, has ended at a decode
        worker.
        """
        self._change_sequence(name, -choices, -prompt_tokens * choices, 0)

    def _change_sequence(self, name: str, count: int, tokens: int, blocks: int) -> None:
        row = self._rows.get(name)
        if row is None:
            return
        self.own_sequences[row] = max(0.0, self.own_sequences[row] + count)
        self.own_context[row] = max(0.0, self.own_context[row] + tokens)
        self.promised_blocks[row] = max(0.0, self.promised_blocks[row] + blocks)
        if count > 0:
            self.placed[row] += 1
            self._has_placed = True
        # As ``_sum_up`` does for many rows; numpy takes three times as long for one.
        self.sequences[row] = max(self.reported_sequences[row], self.own_sequences[row])
        self.context_tokens[row] = max(self.reported_context[row], self.own_context[row])
        self.available_blocks[row] = self.reported_blocks[row] - self.promised_blocks[row]

    # Learned costs

    def learn_prefill(self, name: str, computed_tokens: float, context: float, ms: float) -> None:
        """Learn that a worker computed ``computed_tokens`` tokens in ``ms`` milliseconds. Each
        token attended to ``context`` others on average."""
        row = self._rows.get(name)
        if row is None or computed_tokens <= 0 or ms <= 0:
            return
        worker = self._workers[row]
        if worker.prefill is None:
            worker.prefill = prefill_model(worker.prefill_cost)
        if worker.prefill.observe(computed_tokens, computed_tokens * context, ms):
            self._set_prefill(row, worker.prefill.coefficients)

    def _learn_step(self, row: int, load: LoadSnapshot, now_ms: float) -> None:
        worker = self._workers.get(row)
        if worker is None or load.step_ms <= 0 or load.step_batch <= 0:
            return
        self.stepped_at[row] = now_ms
        if worker.step is None:
            worker.step = step_model(worker.step_cost)
        if worker.step.observe(load.step_batch, load.step_context_tokens, load.step_ms):
            self._set_step(row, worker.step.coefficients)

    def _set_prefill(self, row: int, found: Coefficients) -> None:
        self.prefill_a[row], self.prefill_b[row], self.prefill_c[row] = found

    def _set_step(self, row: int, found: Coefficients) -> None:
        self.step_a[row], self.step_b[row], self.step_c[row] = found

    # Columns that depend on the time or on a request

    def queue_ms(self, now_ms: float) -> Floats:
        """Return, for each row, the milliseconds that a prompt would wait at the worker if it
        arrived now."""
        own = self.own_until - now_ms
        np.maximum(own, self.own_floor, out=own)
        others = self.others_until - now_ms
        np.maximum(others, 0.0, out=others)
        own += others
        return own

    def recent_work(self, now_ms: float) -> Floats:
        """Return, for each row, the worker's recent work in milliseconds, decayed by
        ``HALF_LIFE_MS``.
        """
        faded: Floats = self.work * (2.0 ** -self._exponent(now_ms))
        return faded

    def _exponent(self, now_ms: float) -> float:
        # Work is scaled as if it had all arrived at the epoch, so that no row needs its own decay.
        exponent = (now_ms - self._epoch_ms) / HALF_LIFE_MS
        if exponent > _LONGEST_EXPONENT:
            self.work *= 2.0 ** -min(exponent, 1000.0)
            self._epoch_ms = now_ms
            exponent = 0.0
        return exponent

    def held_blocks(self, held: Mapping[str, int]) -> tuple[Floats, Rows]:
        """Return, for each row, how many leading blocks of a prompt the worker holds and can use,
        and the rows in which that is not 0. Unknown workers are left out.
        """
        found = held_by(held)
        column = np.zeros(self._capacity)
        if not len(found.numbers) and not found.more:
            return column, _NO_ROWS
        if len(found.numbers):
            column[self._rows_of(found.names)[found.numbers]] = found.depths
        if found.more:
            rows = np.fromiter(map(self._rows.__getitem__, found.more), np.intp, len(found.more))
            depths = np.fromiter(found.more.values(), np.float64, len(found.more))
            column[rows] = np.maximum(column[rows], depths)
        column[-1] = 0.0
        if self._coarse:
            # A block that matches only in part is of no use.
            column -= column % self.per_block
        return column, np.flatnonzero(column)

    def _rows_of(self, names: Mapping[int, str]) -> Rows:
        """Return the row of each worker number of the prefix index; -1 for unknown workers."""
        if names is not self._index_names or self._index_rows is None:
            rows = np.full(MAX_NUMBERS, -1, dtype=np.intp)
            for number, name in names.items():
                rows[number] = self._rows[name]
            self._index_names, self._index_rows = names, rows
        return self._index_rows

    def best_of_shape(self, rows: Rows, values: Floats) -> Floats | float:
        """Return, for each row of the table, the maximum of ``values`` over those of ``rows`` whose
        workers have the same KV shape; 0 if there is none. One number stands for all rows if all
        workers have one shape.
        """
        if len(self._shapes) <= 1:
            return float(values.max(initial=0.0))
        best = np.zeros(len(self._shapes) + 1)
        np.maximum.at(best, self.shape[rows].astype(np.intp), values)
        return best[self.shape.astype(np.intp)]


def scores(workers: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Return each worker's score for a cache key or session by rendezvous hashing. The worker with
    the highest score gets the key.

    A worker that leaves moves only its own keys; a new one takes an equal share from each (Thaler
    and Ravishankar, Using Name-Based Mappings to Increase Hit Rates, IEEE/ACM Transactions on
    Networking 6(1), 1998). Both hashes are mixed by SplitMix64's finalizer: Steele, Lea and Flood,
    Fast Splittable Pseudorandom Number Generators, OOPSLA 2014."""
    mixed = workers ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def preferred_row(table: WorkerTable, rows: Rows, key: str) -> int:
    """Return the row, among ``rows``, of the worker that gets the cache key or session ``key`` by
    rendezvous hashing. ``rows`` must not be empty."""
    return int(rows[scores(table.slot_hash[rows], hash_of(key)).argmax()])
