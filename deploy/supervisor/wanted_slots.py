"""In which slots a worker is to be, while the pools' sizes change. Pure.

A pool of size n has the slots ``<pool>-0`` to ``<pool>-<n-1>``: when it shrinks, those with the
highest numbers, which are the newest, go first; when it grows again, they come back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class WantedSlots:
    """Owned by the supervisor's event loop."""

    def __init__(self, configured: Mapping[str, int], living: Collection[str] = ()) -> None:
        """``configured``: workers by pool. ``living``: the slots of those that were found.

        Whoever lives is wanted until somebody says otherwise: a pool that had grown keeps its size
        even where what was chosen is lost, or cannot be read.
        """
        self._sizes = dict(configured)
        self._chosen: dict[str, int] = {}
        for slot in living:
            pool, number = split(slot)
            if pool in self._sizes and number >= self._sizes[pool]:
                self._sizes[pool] = self._chosen[pool] = number + 1

    def choose(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """What operators have chosen, as far as it is known there; of other pools nothing changes.

        Returns what is not known there and should be.
        """
        known = {pool: count for pool, count in sizes.items() if pool in self._sizes}
        self._sizes.update(known)
        self._chosen.update(known)
        return {pool: count for pool, count in self._chosen.items() if pool not in known}

    def slots(self) -> frozenset[str]:
        """All of them."""
        sizes = self._sizes.items()
        return frozenset(f"{pool}-{number}" for pool, count in sizes for number in range(count))


def split(slot: str) -> tuple[str, int]:
    """A slot's pool, and its number there; ("", 0) of what is no slot's name."""
    pool, _, number = slot.rpartition("-")
    return (pool, int(number)) if number.isdecimal() else ("", 0)
