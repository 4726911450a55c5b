"""Which faults come, in what order and for how long: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.faults.kinds import Kind

_SIMULTANEOUS = 0.2
"""Share of the rounds in which two faults come at once."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault."""

    kind: Kind
    seconds: float
    """How long it lasts."""
    pick: int
    """Which of the possible victims it hits: this number, counted in a circle."""


@dataclass(frozen=True, slots=True)
class Round:
    """What is done to the cluster at once, before it may recover."""

    strikes: tuple[Strike, ...]


def rounds(seed: int, kinds: Sequence[Kind]) -> Iterator[Round]:
    """Rounds without end. Every kind comes once before any comes again.

    Two faults at once are never of one target: two dead workers of a role leave no spare, and then
    there is nothing to be learnt but that. A standstill comes alone, and launchers are away once.
    """
    source = random.Random(seed)
    deck: list[Kind] = []
    while True:
        if not deck:
            deck = source.sample(kinds, len(kinds))
        drawn = [deck.pop()]
        if source.random() < _SIMULTANEOUS:
            others = [kind for kind in deck if _may_meet(drawn[0], kind)]
            if others:
                drawn.append(others[-1])
                deck.remove(others[-1])
        yield Round(tuple(_strike(source, kind) for kind in drawn))


def rounds_until_all(seed: int, kinds: Sequence[Kind]) -> int:
    """How many rounds there are until every kind has come."""
    left = {kind.name for kind in kinds}
    for number, one in enumerate(rounds(seed, kinds), 1):
        left -= {strike.kind.name for strike in one.strikes}
        if not left:
            return number
    raise AssertionError("rounds have no end")


def _may_meet(one: Kind, other: Kind) -> bool:
    away = one.needs_launchers + other.needs_launchers
    # What hits the whole cluster may hit who leads it.
    if away == 2 or (away and "cluster" in (one.target, other.target)):
        return False
    return one.target != other.target and not (one.is_standstill or other.is_standstill)


def _strike(source: random.Random, kind: Kind) -> Strike:
    """Of a standstill from 2 to 60 s, half last for less than 11 s: it costs the run its time."""
    share = source.random()
    if kind.is_standstill:
        seconds = kind.min_s * (kind.max_s / kind.min_s) ** share
    else:
        seconds = kind.min_s + (kind.max_s - kind.min_s) * share
    seconds = round(seconds, 2)
    return Strike(kind, seconds, source.randrange(1 << 16))
