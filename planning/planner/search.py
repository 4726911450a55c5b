"""The cheapest counts that meet a condition, with few looks at it.

The condition is taken to be monotone: more workers of either pool never spoil it. So whoever is
larger in both pools than one that meets it need not be tried, nor whoever is smaller in both than
one that does not. The floor, enlarged until it meets the condition, bounds the price. The least
prefill workers beside as many decode workers as that price has, and the other way round, bound what
is left; between these bounds the fewest decode workers are looked for, one number of prefill
workers after the other, for as long as that can still be cheaper. All by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planning.planner.cluster_kind import Counts

Meets = Callable[[Counts], bool]
Price = Callable[[Counts], float]
Allows = Callable[[Counts], bool]
_GROWTHS = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""How much more than the floor is tried at first, until something meets the condition."""


class Monotone:
    """A condition that is asked only where the answer does not follow from earlier ones."""

    def __init__(self, meets: Meets) -> None:
        self._meets = meets
        self._met: list[Counts] = []
        self._missed: list[Counts] = []

    def __call__(self, counts: Counts) -> bool:
        """Whether ``counts`` meet it."""
        if any(_within(known, counts) for known in self._met):
            return True
        if any(_within(counts, known) for known in self._missed):
            return False
        found = self._meets(counts)
        (self._met if found else self._missed).append(counts)
        return found


def cheapest(meets: Meets, price: Price, allows: Allows, floor: Counts) -> Counts | None:
    """The cheapest counts from ``floor`` on that are allowed and meet it; None: there are none.

    ``price`` grows with both counts. ``allows`` holds for all that are smaller than some that it
    holds for.
    """
    if not allows(floor):
        return None
    is_met = Monotone(meets)
    best = _first_met(is_met, allows, floor)

    def is_cheaper(counts: Counts) -> bool:
        return allows(counts) and (best is None or price(counts) < price(best))

    if not is_cheaper(floor):
        return best
    most = Counts(
        _most(floor.prefill, lambda n: is_cheaper(Counts(n, floor.decode))),
        _most(floor.decode, lambda n: is_cheaper(Counts(floor.prefill, n))),
    )
    # So many of both may be more than is allowed: where even they miss it there is no hope.
    if not is_met(most):
        return best
    min_prefill = least(floor.prefill, most.prefill, lambda n: is_met(Counts(n, most.decode)))
    min_decode = least(floor.decode, most.decode, lambda n: is_met(Counts(most.prefill, n)))
    for prefill in range(min_prefill, most.prefill + 1):
        if not is_cheaper(Counts(prefill, min_decode)):
            break
        decode = _fewest(is_met, is_cheaper, prefill, min_decode)
        if decode is not None:
            best = Counts(prefill, decode)
    return best


def best_split(value: Callable[[Counts], float], allows: Allows, start: Counts) -> Counts | None:
    """Of the counts that leave no room for another decode worker those of the greatest value.

    It is taken to rise to one summit, as one pool's loss is the other one's gain: climbed from
    ``start``'s number of prefill workers by halving steps. None where not even one worker of each
    is allowed.
    """
    if not allows(Counts(1, 1)):
        return None
    most = _most(1, lambda n: allows(Counts(n, 1)))

    def filled(prefill: int) -> Counts:
        return Counts(prefill, _most(1, lambda n: allows(Counts(prefill, n))))

    place = min(max(1, start.prefill), most)
    step = 1 << max(0, (most // 4).bit_length() - 1)
    while step:
        near = [one for one in (place - step, place + step) if 1 <= one <= most]
        better = max(near, key=lambda one: value(filled(one)), default=place)
        if value(filled(better)) > value(filled(place)):
            place = better
        else:
            step //= 2
    return filled(place)


def least(low: int, high: int, meets: Callable[[int], bool]) -> int:
    """The least number that meets it, where ``high`` does: by steps that double, then by halving.

    What is looked for lies mostly near ``low``.
    """
    step = 1
    while low < high:
        middle = min(low + step - 1, high - 1)
        if meets(middle):
            high = middle
            return _halved(low, high, meets)
        low, step = middle + 1, step * 2
    return high


def _within(counts: Counts, other: Counts) -> bool:
    return counts.prefill <= other.prefill and counts.decode <= other.decode


def _first_met(is_met: Monotone, allows: Allows, floor: Counts) -> Counts | None:
    """Some counts that meet it, in the floor's ratio: a bound for the price of all others."""
    for growth in _GROWTHS:
        counts = Counts(math.ceil(floor.prefill * growth), math.ceil(floor.decode * growth))
        if not allows(counts):
            return None
        if is_met(counts):
            return counts
    return None


def _fewest(is_met: Monotone, is_cheaper: Allows, prefill: int, low: int) -> int | None:
    """Decode workers beside so many prefill workers, if there is a cheaper number than the best."""
    high = _most(low, lambda n: is_cheaper(Counts(prefill, n)))
    if not is_met(Counts(prefill, high)):
        return None
    return least(low, high, lambda n: is_met(Counts(prefill, n)))


def _halved(low: int, high: int, meets: Callable[[int], bool]) -> int:
    while low < high:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _most(low: int, allows: Callable[[int], bool]) -> int:
    """The greatest number that is allowed, where ``low`` is."""
    step = 1
    while allows(low + step):
        step *= 2
    least, above = low + step // 2, low + step
    while above - least > 1:
        middle = (least + above) // 2
        if allows(middle):
            least = middle
        else:
            above = middle
    return least
