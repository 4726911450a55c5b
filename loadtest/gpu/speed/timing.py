"""Medians of captured work, so that a GPU never waits for its host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from engine.roofline import elapsed
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Timing

Work = Callable[[], object]

_REPEATS, _TOGETHER = 7, 8


def median(place: Place, works: Sequence[Work]) -> float:
    """Median seconds of one of ``works``, which run after one another; 0 where nothing runs."""
    repeats = -(-_TOGETHER // len(works)) if place.on_gpu else 1

    def all_works() -> None:
        for _ in range(repeats):
            for work in works:
                work()

    if place.describes:
        works[0]()
        return 0.0
    run = place.capture()(all_works)
    run()
    found = statistics.median(
        elapsed(place.device, run) for _ in range(_REPEATS if place.on_gpu else 1)
    )
    return found / repeats / len(works)


def timed(
    place: Place, name: str, works: Sequence[Work], peers: Mapping[str, Sequence[Work]]
) -> Timing:
    """``works`` beside the fastest of the peers that this torch and device have."""
    seconds = median(place, works)
    best, best_s, missing = "", None, []
    for peer, others in ({} if place.describes else peers).items():
        try:
            found = median(place, others)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            # Which kernels torch has differs with its version and the device.
            missing.append(f"{peer}: {str(error).splitlines()[0][:80]}")
            continue
        if best_s is None or found < best_s:
            best, best_s = peer, found
    return Timing(name, seconds, best or "; ".join(missing), best_s)
