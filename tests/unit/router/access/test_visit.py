"""Headers of rate limits."""

from __future__ import annotations

import pytest

from router.access.visit import Allowance, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0001, "1ms"),
        (0.25, "250ms"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (59.9991, "1m0s"),
        (60.0, "1m0s"),
        (125.2, "2m6s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_limits_are_written_as_openai_does() -> None:
    assert Allowance("tokens", 100, 40, 36.0).headers() == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "40",
        "x-ratelimit-reset-tokens": "36s",
    }
