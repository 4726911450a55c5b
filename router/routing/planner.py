"""Decides where requests go and keeps account of what was promised: the policy's memory.

    decided ─promise→ computing ─first token→ running ─end→ ended

One for a router; ``loadtest`` replays traces through the same object. Plain Python, ``now`` in
seconds of any one clock; owned by the router's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from baton.autoscaling.traffic import TrafficCounts
from router.routing.cost_model import mean_context
from router.routing.expected_blocks import ExpectedBlocks
from router.routing.policy import Decision, Policy, RouteRequest
from router.routing.transfer_costs import TransferCosts
from router.routing.worker_table import WorkerTable

log = logging.getLogger(__name__)


class Planner:
    """See the module's text."""

    def __init__(
        self, policy: Policy, hash_block: int, traffic: TrafficCounts | None = None
    ) -> None:
        """``hash_block``: tokens in a block of the prefix index. ``traffic``: where it is counted

        what prefill workers take for their prompts.
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
        """Where a prompt with these block hashes goes; ``held`` is what the prefix index answered.

        Nothing is promised yet. Raises Unavailable.
        """
        now_ms = now * 1e3
        known = self.expected.joined(held, hashes, now_ms)
        decision = self._policy.decide(request, self.table, self.transfers, known, now_ms)
        log.debug("%d tokens: %s", request.prompt_tokens, decision)
        return decision

    def promise(
        self, decision: Decision, request: RouteRequest, hashes: Sequence[bytes], now: float
    ) -> Promise:
        """Count a decision against its workers, and expect the blocks that it will create."""
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
        """A worker has left."""
        self.table.remove(worker)
        self.transfers.forget(worker)


class Promise:
    """What one request was promised; every method may be called again and does nothing then."""

    def __init__(
        self, planner: Planner, decision: Decision, prompt_tokens: int, choices: int
    ) -> None:
        self.decision = decision
        self._choices = choices
        self._planner = planner
        self._prompt_tokens = prompt_tokens
        self._computing = True
        self._running = True

    def computed(self, now: float, *, computed_tokens: int = 0, compute_ms: float = 0.0) -> None:
        """The first token has come; the two are what the worker reports, 0 where it does not."""
        if not self._computing:
            return
        self._computing = False
        decision, table = self.decision, self._planner.table
        context = mean_context(self._prompt_tokens, self._prompt_tokens - computed_tokens)
        table.learn_prefill(decision.prefill, computed_tokens, context, compute_ms)
        if computed_tokens and not decision.local:
            self._planner.traffic.prefilled_tokens += self._prompt_tokens
            self._planner.traffic.prefill_s += compute_ms / 1e3
        table.prompt_computed(decision.prefill, decision.prefill_ms, now * 1e3)
        table.sequence_settled(decision.decode, decision.missing_blocks)

    def committed(self, *, pinned_blocks: int, transfer_ms: float) -> None:
        """The handoff has ended: what it took, and how many blocks were there already."""
        blocks = -(-self._prompt_tokens // self._planner.table.hash_block) - pinned_blocks
        self._planner.transfers.observe(
            self.decision.prefill, self.decision.decode, max(0, blocks), transfer_ms
        )

    def ended(self, now: float) -> None:
        """The request has ended, well or not."""
        self.computed(now)
        if self._running:
            self._running = False
            self._planner.table.sequence_ended(
                self.decision.decode, self._prompt_tokens, self._choices
            )
