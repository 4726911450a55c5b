"""Costs of prefill, decode steps and transfers in milliseconds, learned while workers serve.

    prefill_ms  = a + b*n + c*n*context        n tokens that attend to ``context`` others on average
    step_ms     = a + b*batch + c*context_tokens
    transfer_ms = a + b*blocks      the part that computing does not hide, for blocks that the
                                    receiver lacks

The method is recursive least squares with exponential forgetting, in its information form (Ljung
and Söderström, Theory and Practice of Recursive Identification, 1983, chapter 2). It has three
changes:
- Residuals are relative, since the error of a long prompt is larger too. Large residuals count with
  Huber's weight (Robust Estimation of a Location Parameter, 1964). So one prompt that was delayed
  by a second changes little, and a slower worker is recognized after some dozens of prompts.
- No coefficient is negative: the quadratic form is minimized over every set of coefficients that
  may be nonzero. With three coefficients that is exact and cheap.
- The initial coefficients (a calibration, or the defaults) stay in the sum with a small weight.
  Some coefficients cannot be learned from the traffic, such as that of the context while all
  prompts have one length. The initial weight keeps them at a sane value.

Plain Python.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

Coefficients = tuple[float, float, float]
"""The coefficients a, b, c of a cost in milliseconds: the constant, per token or sequence, and per
product of two features."""

UNKNOWN: Coefficients = (0.0, 0.0, 0.0)
"""Coefficients that an uncalibrated worker reports."""
PREFILL_DEFAULT: Coefficients = (5.0, 0.3, 0.0001)
"""Prefill costs of an uncalibrated worker: roughly a 135M-parameter model on two CPU cores."""
STEP_DEFAULT: Coefficients = (8.0, 1.0, 0.001)
"""Decode step costs of an uncalibrated worker: roughly a 135M-parameter model on two CPU cores."""

TRANSFER_DEFAULT: Coefficients = (2.0, 0.3, 0.0)
"""Transfer costs of a new cluster: two calls, and 360 KiB per block (the demo model's) at 1.2
GiB/s."""
MAX_PAIRS = 16_384
"""Maximum number of pairs of workers whose transfer costs are remembered. The least recently used
pairs are dropped."""
_TRANSFER_SCALE: Coefficients = (1.0, 32.0, 1.0)

Line = tuple[float, float]
"""The coefficients a and b of the transfers between a pair of workers: constant and per block, in
milliseconds."""

_KEPT = 0.98
"""Factor on the weight of earlier observations at each new one. So about the last 50 observations
count."""
_KEPT_IF_WRONG = 0.9
"""Factor on the weight of earlier observations at each new one, used instead of ``_KEPT`` after a
prediction that was far off. Repeated misses mean that the worker has changed and old observations
are obsolete (Fortescue, Kershenbaum and Ydstie, Implementation of Self-tuning Regulators with
Variable Forgetting Factors, Automatica 17(6), 1981)."""
_NOISE = 0.1
"""Assumed relative error of a measured time. It sets the weight of measurements against that of the
initial coefficients."""
_PRIOR_ERROR = 0.5
"""Assumed relative error of coefficients from a calibration."""
_GUESS_ERROR = 5.0
"""Assumed relative error of the default coefficients."""
_MIN_PRIOR = 1e-3
"""Minimum weight of the initial coefficients, as a fraction of their weight at the start."""
_HUBER = 3.0
"""Residuals are capped at this multiple of a typical residual."""
_SPREAD_STEP = 0.1
_MIN_SPREAD = 0.02
_WIDEST_SPREAD = 1.0
"""Maximum initial value of a typical residual, so that an early outlier does not dominate."""
_MIN_MS = 0.05
"""Lower bound in milliseconds of a predicted time, since residuals are divided by it."""
_SHARE_OF_ALL = 0.05
"""Minimum assumed error of an initial coefficient, as a fraction of a typical cost."""

_SETS: tuple[tuple[int, ...], ...] = ((0, 1), (0, 2), (1, 2), (0,), (1,), (2,))
_SETS_OF_ONE: tuple[tuple[int, ...], ...] = ((0,), (1,))
"""The sets that are left if the third feature was always 0, as in transfers: its coefficient is 0,
and the other two together were tried first."""
_ENTRIES = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


class CostModel:
    """Learns the cost coefficients of one worker, or of one pair of workers.

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
        """Start from the coefficients ``begin``, or from ``default`` if ``begin`` is ``UNKNOWN``.

        ``scale`` has typical values of the three features, such as (1, 512, 512 * 512), which make
        their coefficients comparable."""
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
        """Return the learned coefficients a, b, c; none is negative."""
        a, b, c = self._solution
        first, second, third = self._scale
        return a / first, b / second, c / third

    def observe(self, second: float, third: float, took_ms: float) -> bool:
        """Learn that work with the features (1, ``second``, ``third``) took ``took_ms``
        milliseconds.

        Returns False and learns nothing if an input is negative or not finite."""
        if not all(math.isfinite(v) and v >= 0.0 for v in (second, third, took_ms)):
            return False
        features = (1.0 / self._scale[0], second / self._scale[1], third / self._scale[2])
        known = zip(self._solution, features, strict=True)
        predicted = max(_MIN_MS, sum(x * y for x, y in known))
        residual = abs(took_ms - predicted) / predicted
        wrong = residual > _HUBER * self._spread
        kept = _KEPT_IF_WRONG if wrong else _KEPT
        weight = _HUBER * self._spread / residual if wrong else 1.0
        # Large residuals widen the spread too, by a bounded step. Otherwise a changed worker would
        # look like outliers forever.
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
        """Return the nonnegative coefficients, in scaled units, that minimize the weighted squares
        of the residuals.
        """
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
        is_third_unused = whole is not None and m02 == 0.0 and right[2] == 0.0
        for chosen in _SETS_OF_ONE if is_third_unused else _SETS:
            found = _solve_part(matrix, right, chosen)
            if min(found) < 0.0:
                continue
            # At a zero gradient, the form has the value -x·r/2.
            value = -sum(x * y for x, y in zip(found, right, strict=True))
            if value < least:
                best, least = found, value
        return best


def prefill_model(begin: Coefficients) -> CostModel:
    """Create the cost model of a prefill; ``begin`` is the worker's calibration, or ``UNKNOWN``."""
    return CostModel(begin, PREFILL_DEFAULT, (1.0, 512.0, 512.0 * 512.0))


def step_model(begin: Coefficients) -> CostModel:
    """Create the cost model of a decode step; ``begin`` is the worker's calibration, or
    ``UNKNOWN``.
    """
    return CostModel(begin, STEP_DEFAULT, (1.0, 8.0, 8192.0))


def mean_context(prompt_tokens: float, cached_tokens: float) -> float:
    """Return the mean number of tokens that a computed token attends to, itself included."""
    return (prompt_tokens + cached_tokens) / 2.0


class TransferCosts:
    """Learns the part of a handoff's time that computing does not hide, for each pair of workers.

    A new pair starts from the mean over all pairs. Owned by the router's event loop.
    """

    def __init__(self) -> None:
        self._all = CostModel(UNKNOWN, TRANSFER_DEFAULT, _TRANSFER_SCALE)
        self._pairs: OrderedDict[tuple[str, str], CostModel] = OrderedDict()
        self._lines: dict[tuple[str, str], Line] = {}
        self.usual: Line = _line(self._all)
        """Coefficients a and b for a pair of workers whose transfers were never observed: the mean
        over all pairs."""

    def observe(self, source: str, target: str, blocks: float, ms: float) -> None:
        """Learn that a transfer of ``blocks`` blocks from ``source`` to ``target`` lasted ``ms``
        milliseconds longer than the computing.

        Negative numbers are ignored."""
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
        """Return the coefficients a and b of the transfers between one pair of workers."""
        return self._lines.get((source, target), self.usual)

    def forget(self, worker: str) -> None:
        """Drop what was learned about transfers from and to a worker that has left."""
        for key in [key for key in self._pairs if worker in key]:
            del self._pairs[key]
            self._lines.pop(key, None)

    @property
    def has_pairs(self) -> bool:
        """Whether any pair of workers has coefficients of its own."""
        return bool(self._lines)


def _line(model: CostModel) -> Line:
    a, b, _ = model.coefficients
    return a, b


_Matrix = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]


def _solve_three(
    matrix: _Matrix, right: tuple[float, float, float]
) -> tuple[float, float, float] | None:
    """Solve three linear equations by Cramer's rule. Return None if rounding made the matrix
    singular.
    """
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
    """Solve the equations for one or two of the three coefficients. The others are zero."""
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
