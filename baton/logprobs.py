"""Log probabilities of tokens."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

MAX_TOP_LOGPROBS = 20
"""Maximum number of alternative tokens that a client may request for each position."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position of a text: natural logarithms, of the raw logits.

    They do not include temperature, penalties, bias or filters.
    """

    logprob: float
    """Log probability of the token at the position."""
    top: Sequence[tuple[int, float]] = ()
    """The most likely token ids and their log probabilities, most likely first; of equal ones the
    lower id first."""


_PAIR = struct.Struct("<If")


class PackedTop(Sequence[tuple[int, float]]):
    """Token ids and their log probabilities in 8 bytes each. As tuples they take 116."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        """Wrap ``packed``, pairs of a token id (uint32) and its log probability (fp32),
        little-endian."""
        self.packed = packed

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> PackedTop:
        """Pack ``pairs`` of token ids and log probabilities."""
        return cls(b"".join([_PAIR.pack(token_id, logprob) for token_id, logprob in pairs]))

    def __len__(self) -> int:
        return len(self.packed) // _PAIR.size

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return _PAIR.iter_unpack(self.packed)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[tuple[int, float], ...]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float] | tuple[tuple[int, float], ...]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
