"""Prices."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError
from planning.planner.prices import ASSUMED_PRICES, parse_prices, price_of
from planning.simulator.costs.hardware import ACCELERATORS


def test_every_accelerator_has_one() -> None:
    assert set(ASSUMED_PRICES) == set(ACCELERATORS)


def test_ones_own_go_before() -> None:
    prices = parse_prices(["h200=3.25, a100=1", "0.5"])
    assert price_of(prices, "h200") == 3.25
    assert price_of(prices, "a100") == 1.0
    assert price_of(prices, "b200") == ASSUMED_PRICES["b200"]
    assert price_of(prices, "cpu.json") == 0.5


@pytest.mark.parametrize("text", ["h200=", "h200=-1", "h200=nan", "h200", ""])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no price"):
        parse_prices([text])


def test_nobody_guesses_what_a_profile_costs() -> None:
    with pytest.raises(ConfigError, match=r"--price cpu\.json"):
        price_of(parse_prices([]), "cpu.json")
