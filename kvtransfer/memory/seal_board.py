"""Checksums that a writer leaves in memory that its receivers read.

A message with the checksums of a batch would arrive some 0.6 ms after they are known. Where the
receiver reads the writer's memory anyway, it finds them there.

    free ─take→ taken ─publish→ published ─give_back→ free

A board is at the end of the shared file of a worker's blocks, and has regions of equal size, one
for each batch. The first word of a region proves the other ones: it depends on them, and on a
number that the batch's announcement contains. So a receiver never takes half-written checksums, or
those of another batch. Event loops own both ends; one transfer thread publishes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WORD_BYTES = 8
_REGION_WORDS = 2048
_REGIONS = 64
BOARD_BYTES = _REGIONS * _REGION_WORDS * _WORD_BYTES


@dataclass(frozen=True, slots=True)
class Seal:
    """The region of a board in which the checksums of one batch are published."""

    at: int
    """Offset of the region in the shared file, in bytes."""
    mark: int
    """Number that distinguishes this use of the region from others, 64 bits."""
    words: npt.NDArray[np.uint64]
    """The region."""

    def publish(self, checksums: Sequence[int]) -> None:
        """Make the checksums of the batch visible to its receiver."""
        data = np.array(checksums, dtype=np.uint64)
        self.words[1 : 1 + data.size] = data
        self.words[0] = _proof(self.mark, data)


class SealBoard:
    """A worker's board. Owned by its event loop."""

    def __init__(self, words: npt.NDArray[np.uint64], start: int) -> None:
        """``words`` is the memory of the board, uint64 [BOARD_BYTES / 8]. It begins at offset
        ``start`` of the shared file, in bytes."""
        self._words = words.reshape(_REGIONS, _REGION_WORDS)
        self._start = start
        self._free = list(range(_REGIONS))

    def take(self, count: int) -> Seal | None:
        """Return a region for ``count`` checksums. Returns None if none is free or they do not
        fit."""
        if count >= _REGION_WORDS or not self._free:
            return None
        region = self._free.pop()
        at = self._start + region * _REGION_WORDS * _WORD_BYTES
        return Seal(at, secrets.randbits(64), self._words[region])

    def give_back(self, seal: Seal) -> None:
        """Free the region of a batch that has arrived, or whose pair has ended."""
        self._free.append((seal.at - self._start) // (_REGION_WORDS * _WORD_BYTES))


def read_seal(
    file: npt.NDArray[np.uint8], at: int, mark: int, count: int
) -> tuple[int, ...] | None:
    """Return the ``count`` checksums at offset ``at`` of a writer's shared file, uint8 [bytes].

    Returns None if they are not published yet, or there is no such place.
    """
    end = at + (1 + count) * _WORD_BYTES
    if not 0 <= at < end <= file.size or at % _WORD_BYTES:
        return None
    # A copy: the writer may be writing.
    words = file[at:end].view(np.uint64).copy()
    if int(words[0]) != _proof(mark, words[1:]):
        return None
    return tuple(words[1:].tolist())


def _proof(mark: int, checksums: npt.NDArray[np.uint64]) -> int:
    key = mark.to_bytes(_WORD_BYTES, "little")
    digest = hashlib.blake2b(checksums.tobytes(), digest_size=_WORD_BYTES, key=key).digest()
    return int.from_bytes(digest, "little")
