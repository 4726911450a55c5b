"""The bytes of the GPU's memory that are in use, by torch's allocator: sizes in steps of 512."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_STEP = 512
"""The unit of torch's allocator, in bytes (c10/cuda/CUDACachingAllocator.h)."""

_SORT = {"aten::sort", "aten::argsort"}
_SORT_BYTES = 32
"""Of an element, within a sort of several rows: two copies of (row, place), 8 bytes each, the
sorted keys, and what the radix sort exchanges with. An estimate, not a measurement."""


@dataclass(slots=True)
class Section:
    """A part of a run. Bytes beyond those that were there at its beginning."""

    began: int
    highest: int

    @property
    def peak(self) -> int:
        return self.highest - self.began


class Ledger:
    """Knows storages by their addresses, and forgets each when its last tensor is gone."""

    def __init__(self) -> None:
        self.live = 0
        self._known: set[int] = set()
        self._sections: list[Section] = []

    @contextmanager
    def section(self) -> Iterator[Section]:
        section = Section(self.live, self.live)
        self._sections.append(section)
        yield section
        self._sections.remove(section)

    def add(self, storage: torch.UntypedStorage) -> None:
        """A storage that a result lies in; one that is known already is counted once."""
        key, size = storage._cdata, -(-storage.nbytes() // _STEP) * _STEP
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._free, key, size).atexit = False
        self.live += size
        self._reach(self.live)

    def spike(self, op: str, args: Sequence[Any]) -> None:
        """What an operation takes and gives back before it ends, where torch does not show it."""
        if op in _SORT and isinstance(args[0], torch.Tensor):
            self._reach(self.live + _SORT_BYTES * args[0].numel())

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.live -= size

    def _reach(self, size: int) -> None:
        for section in self._sections:
            section.highest = max(section.highest, size)
