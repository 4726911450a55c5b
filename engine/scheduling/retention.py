"""Retention: which cached blocks are evicted last, for which tenant, and until when.

    (none) ─claim→ held ─claimed again→ held, until the later of both times
    held ─it expires, end, another claim of the tenant replaces it→ (none)

A claim covers the leading blocks of a prompt. A named claim is a *pin*: it covers all of its blocks
or none, and only ``end`` or its expiry ends it. An unnamed claim makes room for newer claims of its
tenant, and covers as many leading blocks as there is room for. No claim takes room from another
tenant. A claim outlives its blocks: an evicted block is retained again once it is computed again.
Plain Python, owned by the engine core.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.scheduling.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class RetentionShare:
    """Maximum numbers of blocks of one pool that claims may cover."""

    of_tenant: int
    total: int
    """Maximum number of blocks that claims may cover, for all tenants together."""


@dataclass(frozen=True, slots=True)
class _Claim:
    tenant: str
    digests: Sequence[bytes]
    until: float
    is_pin: bool


class RetentionBook:
    """The claims that retain blocks of one pool, and the number of blocks that each tenant's claims
    cover."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._claims: OrderedDict[tuple[str, bytes | str], _Claim] = OrderedDict()
        """Claims by (tenant, name), or by (tenant, last hash) if unnamed; the newest is last."""
        self._blocks: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        """For each tenant, the number of claims that cover each hash."""
        self._pinned: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        """For each tenant, the number of pins that cover each hash."""

    @property
    def total(self) -> int:
        """Number of blocks that claims cover, cached or not."""
        return sum(map(len, self._blocks.values()))

    @property
    def total_pinned(self) -> int:
        """Number of blocks that the pins of all tenants cover, cached or not."""
        return sum(map(len, self._pinned.values()))

    def pinned(self, tenant: str) -> int:
        """Number of blocks that the pins of a tenant cover."""
        return len(self._pinned.get(tenant, ()))

    def claim(
        self,
        tenant: str,
        digests: Sequence[bytes],
        until: float,
        share: RetentionShare,
        name: str = "",
    ) -> int:
        """Retain the blocks of a prompt's leading hashes until the time ``until``, on the clock of
        ``expire``.

        Returns how many blocks are retained. For a pin, these are all or none. If the number is 0,
        nothing has changed.
        """
        room = min(share.of_tenant, share.total - self.total + self._covered(tenant))
        kept = tuple(digests[: self._fitting(tenant, digests, room)])
        if not kept or (name and len(kept) < len(digests)):
            return 0
        key = (tenant, name or kept[-1])
        known = self._claims.get(key)
        if known is not None:
            until = max(until, known.until)
            self._drop(key)
        while self._covered(tenant, kept) > room:
            self._drop(next(self._unnamed(tenant)))
        self._claims[key] = _Claim(tenant, kept, until, bool(name))
        self._blocks[tenant].update(kept)
        if name:
            self._pinned[tenant].update(kept)
        self._pool.retain(kept)
        self._drop_covered(key)
        return len(kept)

    def end(self, tenant: str, name: str) -> bool:
        """End a tenant's pin of this name. Returns whether there was one."""
        if (tenant, name) not in self._claims:
            return False
        self._drop((tenant, name))
        return True

    def expire(self, now: float) -> None:
        """End the claims whose time is over at ``now``, in seconds."""
        for key in [key for key, claim in self._claims.items() if claim.until <= now]:
            self._drop(key)

    def _covered(self, tenant: str, more: Sequence[bytes] = ()) -> int:
        """Number of distinct blocks that a tenant's claims and ``more`` cover together."""
        return len(self._blocks.get(tenant, Counter[bytes]()).keys() | set(more))

    def _fitting(self, tenant: str, digests: Sequence[bytes], room: int) -> int:
        """Number of leading hashes whose blocks fit into ``room`` blocks, together with the blocks
        of the tenant's pins."""
        covered = set(self._pinned.get(tenant, ()))
        for count, digest in enumerate(digests):
            covered.add(digest)
            if len(covered) > room:
                return count
        return len(digests)

    def _unnamed(self, tenant: str) -> Iterator[tuple[str, bytes | str]]:
        """Iterate over the keys of a tenant's unnamed claims (those that are not pins), the oldest
        first."""
        for key, claim in self._claims.items():
            if claim.tenant == tenant and not claim.is_pin:
                yield key

    def _drop_covered(self, key: tuple[str, bytes | str]) -> None:
        """Drop unnamed claims that the claim ``key`` covers. A growing conversation needs only its
        newest claim."""
        claim = self._claims[key]
        covered = set(claim.digests)
        for other in [one for one in self._unnamed(claim.tenant) if one != key]:
            shorter = self._claims[other]
            if shorter.until <= claim.until and shorter.digests[-1] in covered:
                self._drop(other)

    def _drop(self, key: tuple[str, bytes | str]) -> None:
        claim = self._claims.pop(key)
        if claim.is_pin:
            _subtract(self._pinned, claim)
        ended = _subtract(self._blocks, claim)
        others = self._blocks.values()
        self._pool.end_retention(
            [digest for digest in ended if not any(digest in blocks for blocks in others)]
        )

    def check(self) -> None:
        """Assert that the claims and their counts agree."""
        counted: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        pinned: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        for claim in self._claims.values():
            counted[claim.tenant].update(claim.digests)
            if claim.is_pin:
                pinned[claim.tenant].update(claim.digests)
        assert counted == self._blocks, "the claims and their counts disagree"
        assert pinned == self._pinned, "the pins and their counts disagree"
        retained = {digest for own in counted.values() for digest in own}
        assert retained == self._pool.retained, "the pool retains other blocks"


def _subtract(counts: dict[str, Counter[bytes]], claim: _Claim) -> list[bytes]:
    """Remove a claim from a tenant's counts. Returns the hashes that no other claim of the tenant
    covers."""
    own = counts[claim.tenant]
    own.subtract(claim.digests)
    ended = [digest for digest in claim.digests if not own[digest]]
    for digest in ended:
        del own[digest]
    if not own:
        del counts[claim.tenant]
    return ended
