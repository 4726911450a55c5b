"""What every worker would make of one request: a column each, in milliseconds, tokens and blocks.

    prefill_ms = a + b*n + c*n*context      n uncached tokens, ``router.routing.cost_model``
    ttft(p, d) = queue(p) + prefill_ms(p) + unhidden transfer(missing blocks at d)
    ttft(d)    = queue(d) + prefill_ms(d) in the slack between d's steps      (local prefill)
    tpot(d)    = step_ms(batch(d) + 1, context tokens(d) + prompt)

No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.routing.cost_model import TransferCosts
from router.routing.policy import ClassRoute, Decision, RouteRequest
from router.routing.worker_table import Floats, WorkerTable

MIN_CHUNK_TOKENS = 16
"""A local prompt makes at least this progress in a step, whatever it costs the others
(``worker.core.step_planner``)."""
_MIN_MS = 1e-3


@dataclass(slots=True)
class Predictions:
    """One number for each row of the table."""

    request: RouteRequest
    table: WorkerTable
    hash_block: int
    held: Floats
    """Leading blocks that it holds and can use."""
    uncached: Floats
    """Tokens that it would have to compute."""
    prefill_ms: Floats
    """Computing them."""
    queue_ms: Floats
    """The wait before that."""
    fetchable: Floats
    """Leading blocks that it could have, were it to fetch what another worker holds."""
    missing: Floats
    """Blocks that it would have to receive."""
    tpot_ms: Floats
    """A step with one more sequence."""
    fits: npt.NDArray[np.bool_]
    """True where it has room for one more sequence and for the missing blocks."""

    def prefill_from(self, cached: Floats | float) -> Floats:
        """Milliseconds of computing the prompt behind ``cached`` tokens."""
        table, prompt = self.table, self.request.prompt_tokens
        attention = table.prefill_c * ((prompt + cached) / 2.0)
        return table.prefill_a + (prompt - cached) * (table.prefill_b + attention)

    def local(self, slo_tpot_ms: float) -> tuple[Floats, Floats]:
        """TTFT without the queue, and TPOT meanwhile, where decode workers compute it themselves.

        Beside sequences that decode a step takes as much of the prompt as their SLO leaves.
        """
        table = self.table
        step = table.step_a + table.step_b * table.running + table.step_c * table.context_tokens
        least = table.prefill_b * MIN_CHUNK_TOKENS
        chunk = np.minimum(np.maximum(slo_tpot_ms - step, least), self.prefill_ms)
        busy = table.running > 0
        steps = self.prefill_ms / np.maximum(chunk, _MIN_MS)
        ttft = self.prefill_ms + busy * steps * step
        return ttft, np.maximum(busy * (step + chunk), self.tpot_ms)

    def best_holder(self, row: int) -> tuple[str, int]:
        """The worker with the most blocks that the one of ``row`` lacks and can fetch; how many."""
        most = self.fetchable[row]
        if most <= self.held[row]:
            return "", 0
        table = self.table
        holds = (self.held >= most) & (table.lends > 0) & (table.shape == table.shape[row])
        holders = np.flatnonzero(holds)
        idlest = holders[np.argmin(table.sequences[holders])]
        return table.names[idlest], int(most)


def predict(
    request: RouteRequest,
    table: WorkerTable,
    held: Mapping[str, int],
    now_ms: float,
    hash_block: int,
) -> Predictions:
    """Of every row; ``held`` as ``router.routing.policy.Policy`` has it."""
    prompt = request.prompt_tokens
    depth = table.held_blocks(held)
    # The last token is always computed.
    cached = np.minimum(depth * hash_block, prompt - 1)
    uncached = prompt - cached
    attention = table.prefill_c * ((prompt + cached) * 0.5)
    missing = np.maximum(-(-prompt // hash_block) - depth, 0.0)
    room = (missing <= table.available_blocks) & (table.sequences < table.max_sequences)
    step = table.step_a + table.step_b * (table.sequences + 1.0)
    return Predictions(
        request=request,
        table=table,
        hash_block=hash_block,
        held=depth,
        uncached=uncached,
        prefill_ms=table.prefill_a + uncached * (table.prefill_b + attention),
        queue_ms=table.queue_ms(now_ms),
        # The last token is computed into a block of its own.
        fetchable=np.minimum(table.best_of_shape(depth * table.lends), (prompt - 1) // hash_block),
        missing=missing,
        tpot_ms=step + table.step_c * (table.context_tokens + prompt),
        fits=room,
    )


def remote(
    seen: Predictions,
    transfers: TransferCosts,
    source: int,
    target: int,
    reason: str,
    *,
    shed: bool = False,
) -> Decision:
    """The decision that ``source``'s row computes and ``target``'s row decodes."""
    table = seen.table
    names = table.names
    holder, blocks = seen.best_holder(source)
    a, b = transfers.line(names[source], names[target])
    missing = int(seen.missing[target])
    queue, prefill = float(seen.queue_ms[source]), float(seen.prefill_ms[source])
    return Decision(
        prefill=names[source],
        decode=names[target],
        uncached_tokens=int(seen.uncached[source]),
        reason=reason,
        holder=holder,
        holder_blocks=blocks,
        shed=shed,
        ttft_ms=queue + prefill + a + b * missing,
        tpot_ms=float(seen.tpot_ms[target]),
        queue_ms=queue,
        prefill_ms=prefill,
        missing_blocks=missing,
    )


def local(
    seen: Predictions, route: ClassRoute, row: int, reason: str, *, shed: bool = False
) -> Decision:
    """The decision that the worker of ``row`` computes the prompt and decodes."""
    name = seen.table.names[row]
    ttft, tpot = seen.local(route.slo_tpot_ms)
    holder, blocks = seen.best_holder(row)
    queue = float(seen.queue_ms[row])
    return Decision(
        prefill=name,
        decode=name,
        uncached_tokens=int(seen.uncached[row]),
        reason=reason,
        holder=holder,
        holder_blocks=blocks,
        local=True,
        shed=shed,
        ttft_ms=queue + float(ttft[row]),
        tpot_ms=float(tpot[row]),
        queue_ms=queue,
        prefill_ms=float(seen.prefill_ms[row]),
        missing_blocks=int(seen.missing[row]),
    )
