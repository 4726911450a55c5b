"""What a GPU costs an hour. Assumptions, not quotations: set your own with ``--price``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from baton.errors import ConfigError

ASSUMED_PRICES: Mapping[str, float] = {
    "a100": 1.40,
    "h100": 2.30,
    "h200": 3.00,
    "b200": 5.00,
    "l40s": 0.90,
}
"""US dollars per GPU and hour, its share of machine, network and power included. Assumed by us, of
the size of what providers asked on demand at the end of 2025, which differs by two or three times.
"""


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """``h200=3.2`` each, several with commas; lays them over those that are assumed.

    A number alone, with the name ``""``, is the price of whatever has none. Raises ConfigError.
    """
    prices = dict(ASSUMED_PRICES)
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, value = part.rpartition("=")
        prices[name.strip()] = _number(value, part)
    return prices


def price_of(prices: Mapping[str, float], name: str) -> float:
    """Dollars per GPU and hour. Raises ConfigError where nobody said what it costs."""
    price = prices.get(name, prices.get(""))
    if price is None:
        raise ConfigError(f"nobody knows what {name} costs: say --price {name}=DOLLARS")
    return price


def _number(value: str, text: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise ConfigError(f"{text!r} is no price: say h200=3.2, in dollars per GPU and hour")
    return price
