"""The routing state: decides to which workers requests go, and tracks the load that these requests
add to workers.

    decided ─promise→ computing ─first token→ running ─end→ ended

Each router has one; the simulator and ``loadtest`` replay traces through the same class. Plain
Python, ``now`` in seconds of any one clock; owned by the router's event loop."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping, Sequence

from baton.autoscaling.traffic import TrafficCounts
from baton.store.held_blocks import HeldBlocks, held_by
from router.routing.cost_model import TransferCosts, mean_context
from router.routing.policy import Decision, Policy, RouteRequest
from router.routing.worker_table import WorkerTable

log = logging.getLogger(__name__)

EXPECTED_MS = 2000.0
"""Milliseconds after a prompt was computed for which its blocks count as held by the worker. Later
the prefix index lists them, since workers report blocks with each heartbeat."""
MAX_BLOCKS = 1_000_000
"""Maximum number of blocks that are recorded as expected in the workers' caches. Further ones are
not recorded."""


class RoutingState:
    """What routing remembers between decisions: the workers, their costs, and the blocks that
    prompts already routed will create there."""

    def __init__(
        self, policy: Policy, hash_block: int, traffic: TrafficCounts | None = None
    ) -> None:
        """Create an empty state; ``hash_block`` is the number of tokens in a block of the prefix
        index.

        ``traffic`` counts the prompt tokens and seconds of prefill workers.
        """
        self.traffic = traffic or TrafficCounts()
        self.table = WorkerTable(hash_block)
        self.transfers = TransferCosts()
        self.expected = ExpectedBlocks()
        self._policy = policy

    def decide(
        self,
        request: RouteRequest,
        hashes: Sequence[bytes],
        held: Mapping[str, int],
        now: float,
    ) -> Decision:
        """Choose workers for a prompt with the block hashes ``hashes``. The load of the workers in
        the table does not change.

        ``held``: number of leading blocks that each incarnation holds by the prefix index. Raises
        Unavailable."""
        now_ms = now * 1e3
        known = self.expected.joined(held, hashes, now_ms)
        decision = self._policy.decide(request, self.table, self.transfers, known, now_ms)
        log.debug("%d tokens: %s", request.prompt_tokens, decision)
        return decision

    def promise(
        self, decision: Decision, request: RouteRequest, hashes: Sequence[bytes], now: float
    ) -> Promise:
        """Add the load of a decision to its workers in the table. Record the prompt's blocks as
        expected at these workers."""
        now_ms = now * 1e3
        self.table.promise_prompt(decision.prefill, decision.prefill_ms, now_ms)
        self.table.promise_sequence(
            decision.decode, request.prompt_tokens, decision.missing_blocks, request.choices
        )
        self.expected.expect(hashes, decision.prefill, now_ms, decision.ttft_ms)
        if not decision.local:
            self.expected.expect(hashes, decision.decode, now_ms, decision.ttft_ms)
        return Promise(self, decision, request.prompt_tokens, request.choices)

    def remove(self, worker: str) -> None:
        """Remove a worker that has left, with its load, its costs and its expected blocks."""
        self.table.remove(worker)
        self.transfers.forget(worker)


class Promise:
    """The load that one request adds to its workers, from the decision to the request's end. Each
    method has an effect only once."""

    def __init__(
        self, routing: RoutingState, decision: Decision, prompt_tokens: int, choices: int
    ) -> None:
        self.decision = decision
        self._choices = choices
        self._routing = routing
        self._prompt_tokens = prompt_tokens
        self.is_computed = False
        """Whether the request's first token has arrived, or cannot arrive any more."""
        self._running = True

    def computed(self, now: float, *, computed_tokens: int = 0, compute_ms: float = 0.0) -> None:
        """Record that the prompt is computed, with the tokens and milliseconds that the worker
        reported for it. 0 means not reported."""
        if self.is_computed:
            return
        self.is_computed = True
        decision, table = self.decision, self._routing.table
        context = mean_context(self._prompt_tokens, self._prompt_tokens - computed_tokens)
        table.learn_prefill(decision.prefill, computed_tokens, context, compute_ms)
        if computed_tokens and not decision.local:
            self._routing.traffic.prefilled_tokens += self._prompt_tokens
            self._routing.traffic.prefill_s += compute_ms / 1e3
        table.prompt_computed(decision.prefill, decision.prefill_ms, now * 1e3)
        table.sequence_settled(decision.decode, decision.missing_blocks)

    def committed(self, *, pinned_blocks: int, transfer_ms: float) -> None:
        """Record that the handoff is complete. The decode worker already held ``pinned_blocks``
        blocks of the prompt."""
        blocks = -(-self._prompt_tokens // self._routing.table.hash_block) - pinned_blocks
        self._routing.transfers.observe(
            self.decision.prefill, self.decision.decode, max(0, blocks), transfer_ms
        )

    def ended(self, now: float) -> None:
        """Record the end of the request, successful or not."""
        self.computed(now)
        if self._running:
            self._running = False
            self._routing.table.sequence_ended(
                self.decision.decode, self._prompt_tokens, self._choices
            )


class ExpectedBlocks:
    """Blocks that workers are expected to hold soon, by routing decisions. They count as held until
    the prefix index lists them.

    Without this, a burst of requests with one new prefix would be spread over workers that all
    compute it. Hashes are chained: if a block is expected, all before it are. ``now`` is in
    milliseconds."""

    def __init__(self) -> None:
        self._workers: dict[bytes, dict[str, float]] = {}
        self._notes: list[tuple[float, int, str, Sequence[bytes]]] = []
        self._count = 0
        self._blocks = 0

    def __len__(self) -> int:
        """Return the number of recorded pairs of block and worker, with duplicates."""
        return self._blocks

    def expect(self, hashes: Sequence[bytes], worker: str, now: float, wait: float = 0.0) -> None:
        """Record that ``worker`` is expected to hold the blocks ``hashes``, a prompt's first ones.
        It computes them within about ``wait`` milliseconds."""
        self._forget(now)
        if not hashes or self._blocks + len(hashes) > MAX_BLOCKS:
            return
        until = now + wait + EXPECTED_MS
        for block in hashes:
            workers = self._workers.setdefault(block, {})
            workers[worker] = max(until, workers.get(worker, 0.0))
        self._count += 1
        heapq.heappush(self._notes, (until, self._count, worker, hashes))
        self._blocks += len(hashes)

    def joined(self, held: Mapping[str, int], hashes: Sequence[bytes], now: float) -> HeldBlocks:
        """Return how many leading blocks of a prompt each worker holds by ``held`` or is expected
        to hold."""
        self._forget(now)
        more: dict[str, int] = {}
        alive: dict[str, float] = {}
        depth = 0
        for block in hashes:
            workers = self._workers.get(block, {})
            if depth and len(workers) < len(alive):
                more.update(dict.fromkeys(alive.keys() - workers.keys(), depth))
            alive = workers
            if not workers:
                break
            depth += 1
        more.update(dict.fromkeys(alive, depth))
        return held_by(held).raised(more)

    def _forget(self, now: float) -> None:
        while self._notes and self._notes[0][0] <= now:
            until, _, worker, hashes = heapq.heappop(self._notes)
            self._blocks -= len(hashes)
            for block in hashes:
                # Another note with the same expiry may have removed the worker already.
                workers = self._workers.get(block, {})
                if workers.get(worker, until + 1.0) <= until:
                    del workers[worker]
                    if not workers:
                        del self._workers[block]
