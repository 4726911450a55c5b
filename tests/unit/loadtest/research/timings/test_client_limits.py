"""The load generator against an echo in another process."""

from __future__ import annotations

import pytest
import uvloop
from rich.console import Console

from loadtest.research.timings.client_limits import measure


def check(rate: float, seconds: float) -> None:
    run = uvloop.run(measure(rate, seconds, 100, 8, 0.002, Console(quiet=True)))
    found = run.summary.all
    assert found.ok == found.requests == found.ttft.count
    assert found.output_tokens == 8 * found.ok
    # Of a Poisson process: seven standard deviations.
    count = rate * run.summary.window_s
    assert found.requests == pytest.approx(count, abs=7 * count**0.5)
    assert len(run.records) > found.requests
    assert all(record.outcome == "ok" for record in run.records)


def test_a_rate() -> None:
    check(100.0, 0.6)


@pytest.mark.long
def test_five_hundred_requests_a_second() -> None:
    check(500.0, 10.0)
