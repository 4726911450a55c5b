"""What prefill, decode steps and transfers cost, in milliseconds: learned while workers serve.

    prefill_ms  = a + b*n + c*n*context        n tokens that attend to ``context`` others on average
    step_ms     = a + b*batch + c*context_tokens
    transfer_ms = a + b*blocks      what of a handoff the computing does not hide, of blocks that
                                    the receiver lacks

Recursive least squares with exponential forgetting, in its information form (Ljung and Söderström,
Theory and Practice of Recursive Identification, 1983, chapter 2), with three changes:

- Residuals are relative, since a long prompt's error is longer too, and large ones count with
  Huber's weight (Robust Estimation of a Location Parameter, 1964): one prompt that was held up for
  a second teaches little, a worker that has become slower is believed after some dozens.
- No coefficient is negative: the quadratic form is minimised over every set of coefficients that
  may be other than zero. With three that is exact and cheap.
- Where the coefficients began (a calibration, or the defaults) stays in the sum with a small
  weight, so that what traffic does not tell, such as the share of the context while all prompts are
  of one length, keeps a sane value.

Plain Python.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

Coefficients = tuple[float, float, float]
"""a, b, c in milliseconds per 1, per token or sequence, per their product."""

UNKNOWN: Coefficients = (0.0, 0.0, 0.0)
"""What a worker reports that was not calibrated."""
PREFILL_DEFAULT: Coefficients = (5.0, 0.3, 0.0001)
"""Of a worker that was not calibrated: a model of 135 million weights on two CPU cores, roughly."""
STEP_DEFAULT: Coefficients = (8.0, 1.0, 0.001)
"""As ``PREFILL_DEFAULT``, of a decode step."""

TRANSFER_DEFAULT: Coefficients = (2.0, 0.3, 0.0)
"""Two calls, and 360 KiB a block (the demo model's) at 1.2 GiB/s."""
MAX_PAIRS = 16_384
"""Pairs that are remembered; those unused for longest are forgotten."""
_TRANSFER_SCALE: Coefficients = (1.0, 32.0, 1.0)

Line = tuple[float, float]
"""a and b of a pair's transfers."""

_KEPT = 0.98
"""The share of its weight that an observation keeps when the next one comes: a memory of 50."""
_KEPT_IF_WRONG = 0.9
"""The same where the prediction was far off: where that goes on, the worker has changed, and what
was learned is no longer true (Fortescue, Kershenbaum and Ydstie, Implementation of Self-tuning
Regulators with Variable Forgetting Factors, Automatica 17(6), 1981)."""
_NOISE = 0.1
"""Relative noise of a timing, against which the beginning is weighed."""
_PRIOR_ERROR = 0.5
"""Relative error that a calibration may have."""
_GUESS_ERROR = 5.0
"""Relative error that the defaults may have."""
_MIN_PRIOR = 1e-3
"""The share of its weight that the beginning never loses."""
_HUBER = 3.0
"""Residuals of more than this many typical ones count as this many."""
_SPREAD_STEP = 0.1
_MIN_SPREAD = 0.02
_WIDEST_SPREAD = 1.0
"""At the start: an early outlier must not be what is believed."""
_MIN_MS = 0.05
"""Shorter predictions are taken as this when a residual is divided by them."""
_SHARE_OF_ALL = 0.05
"""A coefficient's error is at least that of this share of a typical cost."""

_SETS: tuple[tuple[int, ...], ...] = ((0, 1), (0, 2), (1, 2), (0,), (1,), (2,))
_ENTRIES = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


class CostModel:
    """The coefficients of one worker, or of one pair of workers.

    Owned by the router's event loop.
    """

    __slots__ = (
        "_begun",
        "_information",
        "_prior",
        "_right",
        "_scale",
        "_solution",
        "_spread",
        "_weights",
    )

    def __init__(self, begin: Coefficients, default: Coefficients, scale: Coefficients) -> None:
        """Starts from ``begin``, or from ``default`` where that is ``UNKNOWN``.

        ``scale`` is the size of typical features, such as (1, 512, 512 * 512): within it the three
        are compared.
        """
        known = begin != UNKNOWN
        start = begin if known else default
        self._scale = scale
        self._begun = [value * size for value, size in zip(start, scale, strict=True)]
        error = _PRIOR_ERROR if known else _GUESS_ERROR
        floor = _SHARE_OF_ALL * sum(self._begun) or 1.0
        self._weights = [1.0 / (error * max(value, floor)) ** 2 for value in self._begun]
        self._prior = 1.0
        self._spread = min(error, _WIDEST_SPREAD)
        self._information = [0.0] * 6
        self._right = [0.0] * 3
        self._solution = self._solve()

    @property
    def coefficients(self) -> Coefficients:
        """a, b, c; none is negative."""
        a, b, c = self._solution
        first, second, third = self._scale
        return a / first, b / second, c / third

    def observe(self, second: float, third: float, took_ms: float) -> bool:
        """Work with the features (1, ``second``, ``third``) took so long.

        False, and nothing is learned, where one of them is negative or not a number.
        """
        if not all(math.isfinite(v) and v >= 0.0 for v in (second, third, took_ms)):
            return False
        features = (1.0 / self._scale[0], second / self._scale[1], third / self._scale[2])
        known = zip(self._solution, features, strict=True)
        predicted = max(_MIN_MS, sum(x * y for x, y in known))
        residual = abs(took_ms - predicted) / predicted
        wrong = residual > _HUBER * self._spread
        kept = _KEPT_IF_WRONG if wrong else _KEPT
        weight = _HUBER * self._spread / residual if wrong else 1.0
        # Large ones move it too, a bounded way: else a worker that changed would stay unbelieved.
        moved = min(residual, (_HUBER + 1.0) * self._spread) - self._spread
        self._spread = max(_MIN_SPREAD, self._spread + _SPREAD_STEP * moved)
        weight /= (_NOISE * predicted) ** 2
        self._prior = max(_MIN_PRIOR, self._prior * kept)
        for place, (row, column) in enumerate(_ENTRIES):
            added = weight * features[row] * features[column]
            self._information[place] = kept * self._information[place] + added
        for place in range(3):
            self._right[place] = kept * self._right[place] + weight * features[place] * took_ms
        self._solution = self._solve()
        return True

    def _solve(self) -> tuple[float, float, float]:
        """The least weighted squares over what is not negative, in scaled coefficients."""
        m00, m01, m02, m11, m12, m22 = self._information
        w0, w1, w2 = (self._prior * weight for weight in self._weights)
        matrix = ((m00 + w0, m01, m02), (m01, m11 + w1, m12), (m02, m12, m22 + w2))
        right = (
            self._right[0] + w0 * self._begun[0],
            self._right[1] + w1 * self._begun[1],
            self._right[2] + w2 * self._begun[2],
        )
        whole = _solve_three(matrix, right)
        if whole is not None and min(whole) >= 0.0:
            return whole
        best, least = (0.0, 0.0, 0.0), 0.0
        for chosen in _SETS:
            found = _solve_part(matrix, right, chosen)
            if min(found) < 0.0:
                continue
            # Where the gradient is zero, the form is worth -x·r/2.
            value = -sum(x * y for x, y in zip(found, right, strict=True))
            if value < least:
                best, least = found, value
        return best


def prefill_model(begin: Coefficients) -> CostModel:
    """Of a prompt's computing; ``begin`` is the worker's calibration, or ``UNKNOWN``."""
    return CostModel(begin, PREFILL_DEFAULT, (1.0, 512.0, 512.0 * 512.0))


def step_model(begin: Coefficients) -> CostModel:
    """Of a decode step; ``begin`` is the worker's calibration, or ``UNKNOWN``."""
    return CostModel(begin, STEP_DEFAULT, (1.0, 8.0, 8192.0))


def mean_context(prompt_tokens: float, cached_tokens: float) -> float:
    """How many tokens one that is computed attends to on average: those before it, and itself."""
    return (prompt_tokens + cached_tokens) / 2.0


class TransferCosts:
    """What of a handoff the computing does not hide, per pair of workers.

    A pair of which nothing is known yet counts as the mean pair. Owned by the router's event loop.
    """

    def __init__(self) -> None:
        self._all = CostModel(UNKNOWN, TRANSFER_DEFAULT, _TRANSFER_SCALE)
        self._pairs: OrderedDict[tuple[str, str], CostModel] = OrderedDict()
        self._lines: dict[tuple[str, str], Line] = {}
        self.usual: Line = _line(self._all)
        """The line of a pair of which nothing is known."""

    def observe(self, source: str, target: str, blocks: float, ms: float) -> None:
        """``blocks`` went from ``source`` to ``target``, ``ms`` of the time after the computing.

        Negative numbers teach nothing.
        """
        if blocks < 0 or ms < 0:
            return
        key = (source, target)
        pair = self._pairs.pop(key, None)
        if pair is None:
            pair = CostModel((*self.usual, 0.0), TRANSFER_DEFAULT, _TRANSFER_SCALE)
        self._pairs[key] = pair
        if pair.observe(blocks, 0.0, ms):
            self._lines[key] = _line(pair)
        if self._all.observe(blocks, 0.0, ms):
            self.usual = _line(self._all)
        if len(self._pairs) > MAX_PAIRS:
            oldest, _ = self._pairs.popitem(last=False)
            self._lines.pop(oldest, None)

    def line(self, source: str, target: str) -> Line:
        """a and b of one pair."""
        return self._lines.get((source, target), self.usual)

    def forget(self, worker: str) -> None:
        """Drop the pairs of a worker that has left."""
        for key in [key for key in self._pairs if worker in key]:
            del self._pairs[key]
            self._lines.pop(key, None)

    @property
    def told(self) -> bool:
        """Whether any pair has a line of its own."""
        return bool(self._lines)


def _line(model: CostModel) -> Line:
    a, b, _ = model.coefficients
    return a, b


_Matrix = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]


def _solve_three(
    matrix: _Matrix, right: tuple[float, float, float]
) -> tuple[float, float, float] | None:
    """Cramer's rule; None where rounding has made the matrix singular."""
    (a, b, c), (_, e, f), (_, _, i) = matrix
    first, second, third = e * i - f * f, c * f - b * i, b * f - c * e
    determinant = a * first + b * second + c * third
    if determinant <= 1e-12 * a * e * i:
        return None
    x, y, z = right
    return (
        (x * first + y * second + z * third) / determinant,
        (x * second + y * (a * i - c * c) + z * (b * c - a * f)) / determinant,
        (x * third + y * (b * c - a * f) + z * (a * e - b * b)) / determinant,
    )


def _solve_part(
    matrix: _Matrix, right: tuple[float, float, float], chosen: Iterable[int]
) -> tuple[float, float, float]:
    """With all but one or two coefficients at zero."""
    found = [0.0, 0.0, 0.0]
    places = tuple(chosen)
    if len(places) == 1:
        (only,) = places
        found[only] = right[only] / matrix[only][only]
    else:
        one, two = places
        determinant = matrix[one][one] * matrix[two][two] - matrix[one][two] ** 2
        if determinant > 0.0:
            found[one] = (
                right[one] * matrix[two][two] - right[two] * matrix[one][two]
            ) / determinant
            found[two] = (
                right[two] * matrix[one][one] - right[one] * matrix[one][two]
            ) / determinant
    return found[0], found[1], found[2]
