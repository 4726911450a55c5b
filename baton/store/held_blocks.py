"""The answer of the prefix index: how many leading blocks of a prompt each worker holds.

A block that all workers hold, such as a system prompt's, has thousands of holders. So the answer
stays in the index's form, worker numbers and depths as arrays, until a single worker is asked for.
Plain Python and numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

_GROUP = struct.Struct(">HH")
MAX_NUMBERS = 1 << 16
"""Upper bound of worker numbers."""


class HeldBlocks(Mapping[str, int]):
    """Maps incarnations to their numbers of held blocks. Immutable."""

    def __init__(
        self,
        names: Mapping[int, str],
        numbers: npt.NDArray[np.intp],
        depths: npt.NDArray[np.intp],
        more: Mapping[str, int],
    ) -> None:
        """``names``: the incarnation of each worker number; numbers without one are left out.

        ``numbers`` and ``depths``: the workers that hold blocks, and how many each. ``more``: other
        numbers by incarnation; the larger number counts.
        """
        self.names, self.numbers, self.depths, self.more = names, numbers, depths, more

    @classmethod
    def decoded(cls, groups: bytes, names: Mapping[int, str]) -> HeldBlocks:
        """Parse a lookup's answer, which consists of groups of depth, count and worker numbers."""
        numbers: list[npt.NDArray[np.uint16]] = []
        depths: list[int] = []
        at = 0
        while at < len(groups):
            depth, count = _GROUP.unpack_from(groups, at)
            at += _GROUP.size
            numbers.append(np.frombuffer(groups, ">u2", count, at))
            depths.append(depth)
            at += 2 * count
        if not numbers:
            return cls(names, np.empty(0, np.intp), np.empty(0, np.intp), {})
        each = np.repeat(np.array(depths, np.intp), [len(some) for some in numbers])
        return cls(names, np.concatenate(numbers).astype(np.intp), each, {})

    def deepest(self) -> int:
        """Return the largest number of blocks that a worker holds; 0 if there is none."""
        return max(int(self.depths.max(initial=0)), max(self.more.values(), default=0))

    def raised(self, more: Mapping[str, int]) -> HeldBlocks:
        """Return the same with at least the numbers of ``more``."""
        if not more:
            return self
        both = {**self.more, **{k: max(n, self.more.get(k, 0)) for k, n in more.items()}}
        return HeldBlocks(self.names, self.numbers, self.depths, both)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        found: dict[str | None, int] = dict(
            zip(map(self.names.get, self.numbers.tolist()), self.depths.tolist(), strict=True)
        )
        found.pop(None, None)
        for name, depth in self.more.items():
            found[name] = max(depth, found.get(name, 0))
        return {name: depth for name, depth in found.items() if name is not None}

    def __getitem__(self, name: str) -> int:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def held_by(held: Mapping[str, int]) -> HeldBlocks:
    """Return ``held``, numbers of blocks by incarnation, in the form of an answer."""
    if isinstance(held, HeldBlocks):
        return held
    return HeldBlocks({}, np.empty(0, np.intp), np.empty(0, np.intp), held)
