"""Retention of a prompt's blocks on the worker that computes it, within the tenant's share."""

from __future__ import annotations

from baton.errors import CacheShareExceeded
from baton.hashing import last_hashes
from engine.scheduling.retention import RetentionShare
from engine.scheduling.sequence import Sequence
from worker.role import WorkerContext

RETRY_AFTER_S = 60.0
"""Seconds after which a client may retry a request that was rejected because its tenant's share of
the cache is used up."""


def claim_retention(context: WorkerContext, sequence: Sequence, now: float) -> list[bytes]:
    """Retain the prompt's blocks that the request asks to keep, before they are computed.

    Returns the hashes of the leading blocks that are retained. ``now`` is in seconds of the
    monotonic clock. Raises CacheShareExceeded if a retention is required and the tenant's share has
    no room for it.
    """
    spec = sequence.spec
    if not spec.retentions:
        return []
    limits, book = context.engine.scheduler.limits, context.core.retention
    hashes = last_hashes(sequence.full_hashes(limits.hash_block), limits.hashes_per_block)
    share = _share(context, spec.principal.tenant)
    retained = 0
    for wanted in spec.retentions:
        blocks = hashes[: wanted.tokens // limits.block_size]
        count = book.claim(
            spec.principal.tenant, blocks, now + wanted.ttl_s, share, name=wanted.name
        )
        if wanted.required and blocks and not count:
            raise CacheShareExceeded(
                f"the prefix has {len(blocks)} KV blocks, and the tenant has pinned"
                f" {book.pinned(spec.principal.tenant)}: it may pin {share.of_tenant} of a worker's"
                f" {context.engine.pool.total}, and all tenants together {share.total}; unpin a"
                " prefix, or let one expire",
                retry_after=RETRY_AFTER_S,
            )
        retained = max(retained, count)
    return hashes[:retained]


def held_tokens(context: WorkerContext, retained: list[bytes]) -> int:
    """Return the number of tokens in those of the ``retained`` blocks that are cached now.

    ``retained`` is the result of ``claim_retention``.
    """
    return len(context.engine.pool.match(retained)) * context.engine.scheduler.limits.block_size


def _share(context: WorkerContext, tenant: str) -> RetentionShare:
    config, total = context.settings.config, context.engine.pool.total
    return RetentionShare(
        int(config.tenant(tenant).max_pinned_fraction * total),
        int(config.max_pinned_fraction * total),
    )
