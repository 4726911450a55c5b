"""Draws lengths of prompts and answers: distributions of token counts, written as one word.

``128`` or ``fixed:128``; ``uniform:MIN-MAX``; ``normal:MEAN,DEVIATION``;
``lognormal:MEDIAN,SIGMA``. The last two may have a third number, the maximum. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError

_MAX_TOKENS = 1 << 24
_FORMS = "128, uniform:64-256, normal:MEAN,DEVIATION[,MAX] or lognormal:MEDIAN,SIGMA[,MAX]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    first: float
    """First parameter of the distribution: the fixed length, the minimum, the mean, or the
    median."""
    second: float = 0.0
    """Second parameter of the distribution: the maximum (uniform), the standard deviation (normal),
    or the sigma of the logarithm (lognormal)."""
    most: int = _MAX_TOKENS

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Parse a distribution such as ``uniform:MIN-MAX``. Raises ConfigError, which shows the
        valid forms.
        """
        kind, _, rest = text.strip().partition(":")
        if not rest:
            kind, rest = "fixed", kind
        try:
            numbers = [float(part) for part in rest.replace("-", ",").split(",")]
            made = _FORM[kind](numbers)
        except (KeyError, ValueError, TypeError):
            raise ConfigError(f"{text!r} is not a distribution of lengths: {_FORMS}") from None
        if not 1 <= made.first <= made.most <= _MAX_TOKENS or not 0 <= made.second <= made.most:
            raise ConfigError(f"{text!r}: lengths are tokens from 1 to {_MAX_TOKENS}, in order")
        return made

    def text(self) -> str:
        """Return the distribution as text, in the syntax that ``parse`` accepts."""
        if self.kind == "fixed":
            return f"{self.first:g}"
        if self.kind == "uniform":
            return f"uniform:{self.first:g}-{self.second:g}"
        most = "" if self.most == _MAX_TOKENS else f",{self.most}"
        return f"{self.kind}:{self.first:g},{self.second:g}{most}"

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Draw token counts from 1 to ``most``: int64 [count]."""
        if self.kind == "fixed":
            return np.full(count, int(self.first), np.int64)
        if self.kind == "uniform":
            return generator.integers(int(self.first), int(self.second), count, endpoint=True)
        if self.kind == "normal":
            drawn = generator.normal(self.first, self.second, count)
        else:
            drawn = self.first * np.exp(self.second * generator.standard_normal(count))
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)


def _fixed(numbers: list[float]) -> Lengths:
    (length,) = numbers
    return Lengths("fixed", length)


def _uniform(numbers: list[float]) -> Lengths:
    least, most = numbers
    if least > most:
        raise ValueError("the minimum is above the maximum")
    return Lengths("uniform", least, most)


def _normal(numbers: list[float]) -> Lengths:
    mean, deviation, *most = numbers
    return Lengths("normal", mean, deviation, *map(int, most))


def _lognormal(numbers: list[float]) -> Lengths:
    median, sigma, *most = numbers
    return Lengths("lognormal", median, sigma, *map(int, most))


_FORM = {"fixed": _fixed, "uniform": _uniform, "normal": _normal, "lognormal": _lognormal}
