"""Costs in whole nanodollars."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.config.cluster import Config
from baton.config.money import dollars_text
from baton.request import FinishReason, Principal
from baton.sampling_params import SamplingParams
from router.billing.prices import PriceTable
from router.core.request import Choice, GenerationRequest

PRICES = {"input": 0.15, "cached_input": 0.075, "output": 0.6}


def table(classes: Any = (), **prices: Any) -> PriceTable:
    return PriceTable(Config(prices=PRICES | prices, class_prices=classes))


def request(prompt_tokens: int = 10, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        "r",
        tuple(range(prompt_tokens)),
        SamplingParams(seed=0, max_tokens=20),
        Principal("default"),
        60.0,
        **fields,
    )


def choice(prompt: int, completion: int, cached: int = 0) -> Choice:
    finish = FinishReason.STOP
    return Choice(prompt, completion, cached, finish_reason=finish, begun=True)


def test_a_token_costs_a_thousandth_of_the_price_in_microdollars() -> None:
    line = table().line("short", 1_000_000, 400_000, 1_000_000)
    assert dollars_text(line.cost) == "0.72"
    assert [dollars_text(cost) for cost in line.costs] == ["0.09", "0.03", "0.6"]


def test_cached_tokens_cost_what_others_do_unless_they_have_a_price() -> None:
    line = table(cached_input=None).line("short", 100, 60, 0)
    assert line.cost == 100 * 150


def test_no_more_tokens_are_cached_than_there_are() -> None:
    assert table().line("short", 10, 15, 0).cost == 10 * 75


def test_sums_of_many_small_bills_are_exact() -> None:
    prices = table(input=0.001)
    assert sum(prices.line("short", 1, 0, 0).cost for _ in range(10**6)) == 10**6
    assert dollars_text(10**6) == "0.001"


def test_a_class_may_have_prices_of_its_own() -> None:
    prices = table(classes=[{"name": "batch", "input": 0.07, "output": 0.3}])
    background = replace(request(), background=True)
    (line,) = prices.lines([background], [choice(10, 5)])
    assert (line.context_class, line.cost) == ("batch", 10 * 70 + 5 * 300)
    (line,) = prices.lines([request()], [choice(10, 5)])
    assert line.cost == 10 * 150 + 5 * 600


def test_the_maximum_cost_is_that_of_every_answer_at_its_longest() -> None:
    prices = table()
    assert prices.max_cost([request(choices=3), request(4)]) == 14 * 150 + 4 * 20 * 600
    assert prices.max_cost([request(embeds=True)]) == 10 * 150


def test_a_bill_has_all_choices_and_only_what_began() -> None:
    requests = [request(choices=2), request(4)]
    choices = [choice(10, 5, 8), choice(0, 7), Choice(4)]
    (line,) = table().lines(requests, choices)
    assert (line.input_tokens, line.cached_tokens, line.output_tokens) == (10, 8, 12)


@pytest.mark.parametrize(
    ("nanos", "text"),
    [(0, "0"), (1, "0.000000001"), (1_500_000_000, "1.5"), (-250_000_000, "-0.25")],
)
def test_amounts_are_written_exactly(nanos: int, text: str) -> None:
    assert dollars_text(nanos) == text


def test_without_prices_nothing_costs_anything() -> None:
    assert not PriceTable(Config()).any
    assert table().any


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prices": {"input": 0.0005}}, "at most three digits"),
        ({"prices": {"input": -1}}, "greater than or equal to 0"),
        ({"class_prices": [{"name": "huge"}]}, "'huge' is no class"),
        ({"class_prices": [{"name": "short"}, {"name": "short"}]}, "names must differ"),
        ({"tenants": [{"name": "a", "budget": 5}]}, "tokens have no price"),
    ],
)
def test_prices_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**settings)
