"""Hours of each day: spans, and days on which the clocks change."""

from __future__ import annotations

import itertools
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.cluster import load_config
from baton.config.daily_hours import DailyHours, seconds_of
from baton.config.sources import Flag
from baton.errors import ConfigError

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = DailyHours.parse("22:00-06:00", "Europe/Berlin")
HOUR_S = 3600.0


def at(text: str) -> float:
    """Unix seconds of a time in Berlin."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def test_a_night_goes_beyond_midnight() -> None:
    assert NIGHT.contain(at("2026-11-23T22:00"))
    assert NIGHT.contain(at("2026-11-24T05:59"))
    assert not NIGHT.contain(at("2026-11-24T06:00"))
    assert NIGHT.next_begin(at("2026-11-24T06:00")) == at("2026-11-24T22:00")
    assert NIGHT.next_begin(at("2026-11-24T23:30")) == at("2026-11-24T23:30")
    assert NIGHT.spans(at("2026-11-24T05:00"), at("2026-11-24T23:00")) == [
        (at("2026-11-24T05:00"), at("2026-11-24T06:00")),
        (at("2026-11-24T22:00"), at("2026-11-24T23:00")),
    ]


@pytest.mark.parametrize(("night", "hours"), [("2026-03-28", 7), ("2026-10-24", 9)])
def test_a_night_in_which_the_clocks_change_has_another_length(night: str, hours: int) -> None:
    noon = at(f"{night}T12:00")
    spans = NIGHT.spans(noon, noon + 86_400)
    assert seconds_of(spans, noon + 86_400) == hours * HOUR_S


def test_spans_are_counted_up_to_an_end() -> None:
    spans = [(0.0, 10.0), (20.0, 30.0)]
    assert [seconds_of(spans, end) for end in (-1, 5, 15, 25, 99)] == [0, 5, 10, 15, 20]


@given(
    begin=st.integers(0, 1439),
    length=st.integers(1, 1439),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu"]),
    start=st.integers(1_700_000_000, 1_800_000_000),
    passed_s=st.integers(0, 3 * 86_400),
)
def test_all_views_agree(begin: int, length: int, zone: str, start: int, passed_s: int) -> None:
    last = (begin + length) % 1440
    text = f"{begin // 60:02}:{begin % 60:02}-{last // 60:02}:{last % 60:02}"
    hours = DailyHours.parse(text, zone)
    end = start + passed_s
    spans = hours.spans(start, end)
    assert all(start <= first <= last <= end for first, last in spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert 0 <= seconds_of(spans, end) <= passed_s
    for moment in (start, (start + end) // 2, end - 1):
        if start <= moment < end:
            inside = any(first <= moment < last for first, last in spans)
            assert hours.contain(moment) == inside
            begins = hours.next_begin(moment)
            assert hours.contain(begins)
            assert (begins == moment) == inside


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("batch_hours", "22-6", "not HH:MM-HH:MM"),
        ("batch_hours", "22:00-24:30", "ends at 24:00"),
        ("batch_hours", "08:00-08:00", "no part of a day"),
        ("batch_time_zone", "Europe/Atlantis", "no time zone"),
        ("batch_time_zone", "../../etc/passwd", "no time zone"),
    ],
)
def test_faults_in_the_configuration_are_named(field: str, value: str, fault: str) -> None:
    flag = Flag(f"--{field.replace('_', '-')}", (field,), value)
    with pytest.raises(ConfigError, match=fault) as caught:
        load_config(flags=[flag])
    assert flag.name in str(caught.value)


def test_hours_are_read_from_the_configuration() -> None:
    assert load_config().daily_batch_hours is None
    config = load_config(batch_hours="22:00-06:00", batch_time_zone="Europe/Berlin")
    assert config.daily_batch_hours == NIGHT
