"""Periods of budgets, and the slices that routers spend while Redis is away."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.errors import Unavailable
from baton.telemetry.metrics import RouterMetrics
from router.billing.budgets import SLICE_S, Budget, Budgets, Hold

DOLLAR = 1_000_000_000


def at(text: str) -> float:
    return datetime.datetime.fromisoformat(f"{text}+00:00").timestamp()


def budget(**fields: Any) -> Budget:
    key = KeyConfig(name="k", tenant="default", **({"budget": 10.0} | fields))
    found = Budget.of("key", key)
    assert found is not None
    return found


def book(now: list[float]) -> Budgets:
    config = Config(
        prices={"input": 1.0, "output": 1.0}, tenants=[{"name": "acme", "budget": 100.0}]
    )
    metrics = RouterMetrics(CollectorRegistry())
    return Budgets(config, metrics, lambda: now[0], lambda: at("2026-11-23T10:00:00"))


@pytest.mark.parametrize(
    ("every", "now", "period", "left"),
    [
        ("day", "2026-11-23T23:00:00", "2026-11-23", 3600),
        ("month", "2026-11-30T23:00:00", "2026-11", 3600),
        ("month", "2026-12-31T12:00:00", "2026-12", 12 * 3600),
        ("month", "2028-02-01T00:00:00", "2028-02", 29 * 86400),
        ("total", "2026-11-23T23:00:00", "total", None),
    ],
)
def test_periods_are_days_and_months_in_utc(
    every: Any, now: str, period: str, left: float | None
) -> None:
    found = budget(budget_period=every)
    assert found.period(at(now)) == period
    assert found.seconds_left(at(now)) == left


def test_states() -> None:
    found = budget(budget_warn_ratio=0.5, budget_slow_ratio=0.75)
    states = [found.state(used * DOLLAR) for used in (4, 5, 8, 10)]
    assert states == ["ok", "warned", "slowed", "stopped"]


def test_a_key_without_a_budget_has_that_of_its_tenant() -> None:
    budgets = book([0.0])
    found = budgets.of(KeyConfig(name="k", tenant="acme"))
    assert [(one.kind, one.name, one.limit) for one in found] == [("tenant", "acme", 100 * DOLLAR)]
    both = budgets.of(KeyConfig(name="k", tenant="acme", budget=1.0))
    assert [one.kind for one in both] == ["key", "tenant"]
    assert budgets.of(KeyConfig(name="k", tenant="default")) == ()


def test_a_router_that_never_heard_of_a_budget_refuses_without_redis() -> None:
    budgets, found = book([0.0]), budget()
    with pytest.raises(Unavailable, match="Redis does not answer"):
        budgets.hold_of_slices(Hold("e", (found,)), 1)


def test_a_slice_is_spent_once_and_given_back_by_smaller_bills() -> None:
    now = [0.0]
    budgets, found = book(now), budget()
    assert found.slice == DOLLAR // 10
    budgets.learn(found, 0, found.slice, now[0])
    hold = Hold("e", (found,))
    budgets.hold_of_slices(hold, DOLLAR // 10)
    assert (hold.amount, hold.from_slices) == (DOLLAR // 10, True)
    assert hold.periods == ("2026-11",)
    with pytest.raises(Unavailable):
        budgets.hold_of_slices(Hold("f", (found,)), 1)
    budgets.correct((found,), -DOLLAR // 20)
    budgets.hold_of_slices(Hold("f", (found,)), DOLLAR // 20)
    assert budgets.arguments(found) == (10 * DOLLAR, "2026-11", DOLLAR // 10, DOLLAR // 10)


def test_a_slice_expires() -> None:
    now = [0.0]
    budgets, found = book(now), budget()
    budgets.learn(found, 0, found.slice, now[0])
    now[0] = SLICE_S
    with pytest.raises(Unavailable):
        budgets.hold_of_slices(Hold("e", (found,)), 1)


def test_a_used_up_budget_is_warned_of_once_a_period(caplog: pytest.LogCaptureFixture) -> None:
    budgets, found = book([0.0]), budget()
    with caplog.at_level(logging.WARNING):
        for used in (7 * DOLLAR, 8 * DOLLAR, 9 * DOLLAR):
            budgets.learn(found, used, 0, 0.0)
    (record,) = caplog.records
    assert "budget of key 'k' for 2026-11 is used up to 80 %: $8 of $10" in record.getMessage()
