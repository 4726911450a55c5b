"""The parts of a time add up to it, whatever workers say."""

from __future__ import annotations

import math

import pytest

from baton.telemetry.metrics import SECOND_TOKEN_PARTS, TTFT_PARTS
from baton.v1 import prefill_pb2
from router.core.timeline import MAX_ATTEMPTS, AttemptRecord, Timeline


def attempt(
    number: int = 0, at: float = 101.0, prefill: str = "prefill-0", decode: str = "decode-0"
) -> AttemptRecord:
    return AttemptRecord(number, at, prefill, decode, "fastest")


def told(**milliseconds: float) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(**milliseconds)  # type: ignore[arg-type]


def timeline(first_at: float, *attempts: AttemptRecord) -> Timeline:
    made = Timeline()
    made.received_at, made.first_at = 100.0, first_at
    for one in attempts:
        made.begin(one)
    return made


def test_each_part_is_what_a_process_measured() -> None:
    one = attempt()
    made = timeline(105.0, one)
    made.told(one, told(queue_ms=2000, reserve_ms=700, fetch_ms=300, steps_ms=1500))
    assert made.ttft_parts() == pytest.approx(
        {
            "router": 1.0,
            "lost": 0.0,
            "reserve": 0.7,
            "fetch": 0.3,
            "prefill_wait": 1.0,
            "compute": 1.5,
            "other": 0.5,
        }
    )
    assert tuple(made.ttft_parts()) == TTFT_PARTS


def test_earlier_attempts_are_lost_time() -> None:
    first, second = attempt(), attempt(1, 103.0, "prefill-1")
    made = timeline(105.0, first, second, attempt(2, 106.0))
    made.told(second, told(queue_ms=500, steps_ms=1000))
    parts = made.ttft_parts()
    assert (parts["lost"], parts["prefill_wait"], parts["compute"]) == (2.0, 0.5, 1.0)
    assert sum(parts.values()) == pytest.approx(5.0)


def test_tries_that_a_full_decode_worker_refused_are_time_to_reserve() -> None:
    one, other = attempt(prefill="decode-0"), attempt(1, 102.5, "decode-1")
    made = timeline(104.0, one)
    made.refused(one)
    made.begin(other)
    made.told(other, told(steps_ms=400))
    assert made.attempts == [other], "a refusal is no migration"
    parts = made.ttft_parts()
    assert (parts["lost"], parts["reserve"]) == (0.0, 1.5)
    assert sum(parts.values()) == pytest.approx(4.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e12, -5.0])
def test_parts_add_up_whatever_a_worker_says(value: float) -> None:
    one = attempt()
    made = timeline(105.0, one)
    made.told(one, told(queue_ms=value, reserve_ms=value, fetch_ms=value, steps_ms=value))
    one.handed_off(prefill_pb2.HandoffCommitted(transfer_ms=value))
    made.second_at = 106.0
    parts, second = made.ttft_parts(), made.second_token_parts()
    assert all(part >= 0 for part in (*parts.values(), *second.values()))
    assert sum(parts.values()) == pytest.approx(5.0)
    assert sum(second.values()) == pytest.approx(1.0)


def test_a_worker_that_says_nothing_leaves_the_rest() -> None:
    made = timeline(105.0, attempt())
    assert not made.is_first_told
    parts = made.ttft_parts()
    assert (parts["router"], parts["other"]) == (1.0, 4.0)
    assert timeline(105.0).ttft_parts()["other"] == 5.0


def test_the_second_token_waits_for_the_transfer_and_a_decode_step() -> None:
    one = attempt()
    made = timeline(105.0, one)
    assert made.second_token_parts() == {}
    made.second_at = 107.0
    assert not made.is_second_told
    one.handed_off(prefill_pb2.HandoffCommitted(transfer_ms=500, bytes=64))
    assert made.is_second_told
    assert made.second_token_parts() == {"lost": 0.0, "transfer": 0.5, "first_decode": 1.5}
    made.begin(attempt(1, 106.0))
    assert made.second_token_parts() == {"lost": 2.0, "transfer": 0.0, "first_decode": 0.0}
    assert tuple(made.second_token_parts()) == SECOND_TOKEN_PARTS


def test_a_request_without_a_token_has_no_parts() -> None:
    made = Timeline()
    made.begin(attempt())
    assert made.ttft_parts() == made.second_token_parts() == {}


def test_the_first_and_the_last_attempts_are_kept() -> None:
    made = timeline(105.0, *(attempt(number) for number in range(MAX_ATTEMPTS + 5)))
    numbers = [one.number for one in made.attempts]
    assert len(numbers) == MAX_ATTEMPTS
    assert made.dropped == 5
    assert (numbers[0], numbers[-1]) == (0, MAX_ATTEMPTS + 4)
