"""Finds the cheapest counts that meet a condition, with few evaluations.

The condition is assumed to be monotone: more workers of either pool never break it. So counts that
are larger in both pools than counts that meet it need no evaluation, and neither do counts that are
smaller in both than counts that miss it. The floor, enlarged until it meets the condition, bounds
the price. The minimum number of prefill workers, with as many decode workers as that price allows,
and the reverse, bound the rest. Between these bounds, the minimum number of decode workers is
searched for one number of prefill workers after the other, while that can still be cheaper. All
searches are bisections.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planning.planner.cluster_kind import Counts

Meets = Callable[[Counts], bool]
Price = Callable[[Counts], float]
Allows = Callable[[Counts], bool]
_GROWTHS = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Multiples of the lower bound on worker counts. They are tried in this order, until one meets the
condition."""


class Monotone:
    """A condition on worker counts. It is evaluated for some counts only if earlier evaluations do
    not imply the result."""

    def __init__(self, meets: Meets) -> None:
        self._meets = meets
        self._met: list[Counts] = []
        self._missed: list[Counts] = []

    def __call__(self, counts: Counts) -> bool:
        """Return whether ``counts`` meet the condition."""
        if any(_within(known, counts) for known in self._met):
            return True
        if any(_within(counts, known) for known in self._missed):
            return False
        found = self._meets(counts)
        (self._met if found else self._missed).append(counts)
        return found


def cheapest(meets: Meets, price: Price, allows: Allows, floor: Counts) -> Counts | None:
    """Return the cheapest worker counts that are allowed, at least ``floor``, and for which
    ``meets`` is true. None if there are none.

    ``price`` grows with both counts. If ``allows`` holds for some counts, it holds for all smaller
    ones.
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
    # This may exceed what is allowed: if even these counts miss the condition, none meets it.
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
    """Return the worker counts with the highest value, among those to which no further decode
    worker may be added.

    The value is assumed to rise to a single maximum, since one pool's loss is the other one's gain.
    The search climbs from ``start``'s number of prefill workers by halving steps. None if not even
    one worker of each is allowed.
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
    """Return the smallest number from ``low`` to ``high`` that meets ``meets``, if ``high`` does.

    The search takes doubling steps from ``low``, then bisects: the result is usually close to
    ``low``.
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
    """Return worker counts that meet the condition and have the ratio of ``floor``. The cheapest
    counts cost at most as much."""
    for growth in _GROWTHS:
        counts = Counts(math.ceil(floor.prefill * growth), math.ceil(floor.decode * growth))
        if not allows(counts):
            return None
        if is_met(counts):
            return counts
    return None


def _fewest(is_met: Monotone, is_cheaper: Allows, prefill: int, low: int) -> int | None:
    """Return the minimum number of decode workers that meets the condition with ``prefill`` prefill
    workers. None if that is not cheaper than the best counts so far."""
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
    """Return the highest number, from ``low`` on, for which ``allows`` is true. It must be true for
    ``low``."""
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
