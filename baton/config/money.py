"""Prices of tokens, and the budgets of tenants and keys."""

from __future__ import annotations

from pydantic import Field, field_validator

from baton.config.choices import BudgetPeriod
from baton.config.fields import Section

NANOS = 1_000_000_000
"""Nanodollars in a dollar. Amounts of money are whole numbers of them."""
MAX_PRICE = 1_000_000.0
"""Maximum price in dollars per million tokens."""
MAX_BUDGET = 1_000_000.0
"""Maximum budget in dollars. In nanodollars it is below 2^53, up to which Lua counts exactly."""


class PricesConfig(Section):
    """What tokens cost, in dollars per million."""

    input: float = Field(default=0.0, ge=0, le=MAX_PRICE)
    """Price of a million prompt tokens, in dollars, with at most three digits after the point."""
    cached_input: float | None = Field(default=None, ge=0, le=MAX_PRICE)
    """Price of a million prompt tokens that were cached, in dollars; without a value it is that of
    ``input``."""
    output: float = Field(default=0.0, ge=0, le=MAX_PRICE)
    """Price of a million generated tokens, in dollars."""

    @field_validator("input", "cached_input", "output")
    @classmethod
    def _whole_nanodollars(cls, price: float | None) -> float | None:
        # A token then costs a whole number of nanodollars, and sums are exact.
        if price is not None and abs(price * 1000 - round(price * 1000)) > 1e-6:
            raise ValueError(f"a price has at most three digits after the point, not {price}")
        return price


class ClassPrices(PricesConfig):
    """The prices of one context-length class, or of batches."""

    name: str
    """A context-length class, or ``batch`` for the lines of batches."""


class Budgeted(Section):
    """Base of the settings that can have a budget."""

    budget: float = Field(default=0.0, ge=0, le=MAX_BUDGET)
    """Maximum cost of a ``budget_period``, in dollars, over all routers; 0 is unlimited. A request
    that could exceed it gets 429."""
    budget_period: BudgetPeriod = "month"
    """Period of the budget: a calendar day or month in UTC, or all time (total)."""
    budget_warn_ratio: float = Field(default=0.8, gt=0, le=1)
    """Fraction of the budget from which routers log a warning."""
    budget_slow_ratio: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the budget from which requests run in the background, when other traffic leaves
    room; 1 never slows them."""


def nanodollars(dollars: float) -> int:
    """Convert an amount of the configuration, in dollars, to nanodollars."""
    return round(dollars * NANOS)


def dollars_text(nanos: int) -> str:
    """Return an amount of nanodollars as an exact text in dollars: ``0.0012345``."""
    sign = "-" if nanos < 0 else ""
    whole, rest = divmod(abs(nanos), NANOS)
    digits = f"{rest:09}".rstrip("0")
    return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"
