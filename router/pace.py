"""How fast prompts are passed on, so that the tokens of those who were let in keep coming in time.

Prefill takes time from decoding: by larger batches, and where both share cores or links. Plain
Python, no clock.
"""

from __future__ import annotations

import math

LEAST_SHARE = 0.5
"""Where the SLO is missed whatever is done, no more is given up for it."""
MISSES = 0.1
"""The share of answers that may miss the SLO."""
_STEP = 0.03


class Pace:
    """A share of the drain rate at which just ``MISSES`` of the answers come too slowly.

    A quantile is tracked by stochastic approximation (H. Robbins and S. Monro, "A stochastic
    approximation method", Annals of Mathematical Statistics 22(3), 1951), in steps of the share's
    logarithm.
    """

    def __init__(self) -> None:
        self.share = 1.0

    def heard(self, *, in_time: bool) -> None:
        """An answer has ended, and its time per token met the SLO or missed it."""
        step = _STEP * (MISSES if in_time else MISSES - 1.0)
        self.share = min(1.0, max(LEAST_SHARE, self.share * math.exp(step)))
