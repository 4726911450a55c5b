"""Where a request goes: the pair of workers with the least predicted wait.

Plain Python: snapshots in, a decision out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Unavailable

RETRY_AFTER_S = 2.0
"""When a client may come back after it met a pool without workers: a worker starts in seconds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policy sees it."""

    incarnation: str
    queued_tokens: int = 0
    """Prompt tokens that it has still to compute, those promised by this router included."""
    sequences: int = 0
    """Sequences that run, wait, or are promised to it."""
    max_sequences: int = 1
    available_blocks: int = 0
    """Blocks that it could take, as everywhere here counted in the prefix index's size."""
    placed: int = 0
    """Requests that this router has ever sent there: among equals the least used is taken."""
    held_blocks: int = 0
    """Leading blocks of this prompt that the prefix index says it holds."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The pair that was chosen, and why."""

    prefill: str
    decode: str
    uncached_tokens: int
    """Prompt tokens that the prefill worker will have to compute."""
    reason: str
    """``least_wait``, or ``prefix`` where a cached prefix decided."""
    holder: str = ""
    """Another worker, of any role, that holds more of the prompt than the prefill worker; or none.
    """
    holder_blocks: int = 0
    """Leading blocks that the holder has and the prefill worker can use."""


def choose(
    prompt_tokens: int,
    block_size: int,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
) -> Decision:
    """Pick a prefill and a decode worker. Raises Unavailable where a pool has none.

    Prefill time grows with the tokens that are queued and those that are not cached; a decode
    worker's wait with missing room, then with its batch, then with the blocks to be moved.
    """
    if not prefill or not decode:
        role = "decode" if prefill else "prefill"
        raise Unavailable(f"no {role} worker is ready", retry_after=RETRY_AFTER_S)

    def uncached(worker: Candidate) -> int:
        # The last token is always computed.
        cached = min(worker.held_blocks * block_size, prompt_tokens - 1)
        return prompt_tokens - cached

    def prefill_wait(worker: Candidate) -> tuple[int, int, int, str]:
        wait = worker.queued_tokens + uncached(worker)
        return (wait, worker.sequences, worker.placed, worker.incarnation)

    def decode_wait(worker: Candidate) -> tuple[bool, float, int, int, str]:
        missing = -(-prompt_tokens // block_size) - worker.held_blocks
        full = missing > worker.available_blocks or worker.sequences >= worker.max_sequences
        fill = worker.sequences / worker.max_sequences
        return (full, fill, missing, worker.placed, worker.incarnation)

    source = min(prefill, key=prefill_wait)
    target = min(decode, key=decode_wait)
    shortest_queue = min(worker.queued_tokens for worker in prefill)
    by_prefix = source.held_blocks > 0 and source.queued_tokens > shortest_queue
    holder, holder_blocks = _best_holder(prompt_tokens, block_size, source, (*prefill, *decode))
    return Decision(
        source.incarnation,
        target.incarnation,
        uncached(source),
        "prefix" if by_prefix else "least_wait",
        holder,
        holder_blocks,
    )


def _best_holder(
    prompt_tokens: int, block_size: int, source: Candidate, workers: Sequence[Candidate]
) -> tuple[str, int]:
    """Who holds the most that ``source`` lacks, and how many leading blocks that makes."""
    # The last token is always computed, and never into a block of others.
    usable = (prompt_tokens - 1) // block_size

    def preference(worker: Candidate) -> tuple[int, int, str]:
        return (-min(worker.held_blocks, usable), worker.sequences, worker.incarnation)

    best = min(workers, key=preference)
    blocks = min(best.held_blocks, usable)
    if blocks <= source.held_blocks:
        return "", 0
    return best.incarnation, blocks
