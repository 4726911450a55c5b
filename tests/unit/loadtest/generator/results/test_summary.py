"""Summaries: what counts, in which bucket, and the figures."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from loadtest.generator.results.request_record import Outcome, RequestRecord
from loadtest.generator.results.summary import (
    Distribution,
    Window,
    bucket_names,
    bucket_of,
    parse_bounds,
    summarize,
)
from planning.common.slo import Slo

OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "shed", "aborted")


def record(
    due_s: float,
    outcome: Outcome = "ok",
    *,
    input_tokens: int = 10,
    times: tuple[float, ...] = (0.5, 0.6, 0.8),
) -> RequestRecord:
    """With tokens so long after it was due."""
    return RequestRecord(
        number=0,
        due_s=due_s,
        sent_s=due_s + 0.1,
        ended_s=due_s + 1,
        outcome=outcome,
        code="" if outcome == "ok" else outcome,
        input_tokens=input_tokens,
        output_tokens=len(times),
        token_times_s=array("d", [due_s + time for time in times]),
    )


def test_figures() -> None:
    found = summarize(
        [
            record(0.5),
            record(2.0),
            record(3.0, times=(0.5,)),
            record(4.0, times=(3.0, 3.1)),
            record(5.0, "shed", times=()),
            record(6.0, "error", times=()),
            record(6.0, "aborted", times=(1.0,)),
            record(7.0, input_tokens=513),
            record(8.0),
        ],
        Window(1.0, 8.0),
        Slo(ttft_s=1.0, tpot_s=0.15),
    )
    whole = found.all
    assert (whole.requests, whole.ok, whole.error, whole.shed, whole.aborted) == (7, 4, 1, 1, 1)
    assert whole.good == 3
    assert whole.attainment == pytest.approx(3 / 7)
    assert found.goodput_per_s == pytest.approx(3 / 7)
    assert found.offered_per_s == pytest.approx(1.0)
    assert found.output_tokens_per_s == pytest.approx(9 / 7)
    assert whole.ttft.count == 4
    assert whole.ttft.max_ms == pytest.approx(3000)
    # A single token has no TPOT and no gap.
    assert whole.tpot.count == 3
    assert whole.tpot.p50_ms == pytest.approx(150)
    assert whole.itl.count == 5
    assert found.lag.p99_ms == pytest.approx(100)
    assert [(bucket.name, bucket.requests) for bucket in found.buckets] == [
        ("<= 512", 6),
        ("513 - 4096", 1),
    ]
    assert found.codes == {"shed": 1, "error": 1, "aborted": 1}


def test_nothing() -> None:
    found = summarize([], Window(0.0, 0.0), Slo())
    assert (found.all.requests, found.all.attainment, found.goodput_per_s) == (0, 0.0, 0.0)
    assert found.all.ttft == Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.buckets == ()


@given(
    st.lists(
        st.builds(
            record,
            st.floats(0, 10),
            st.sampled_from(OUTCOMES),
            input_tokens=st.integers(1, 9000),
            times=st.lists(st.floats(0, 5), min_size=1, max_size=5).map(
                lambda times: tuple(sorted(times))
            ),
        )
    ),
    st.floats(0, 5),
    st.floats(5, 10),
)
def test_buckets_and_outcomes_add_up(
    records: list[RequestRecord], start: float, end: float
) -> None:
    found = summarize(records, Window(start, end), Slo(ttft_s=1, tpot_s=1), (512, 4096))
    whole = found.all
    assert whole.requests == sum(start <= one.due_s < end for one in records)
    assert whole.requests == whole.ok + whole.error + whole.shed + whole.aborted
    for name in ("requests", "ok", "error", "shed", "aborted", "good", "output_tokens"):
        assert getattr(whole, name) == sum(getattr(one, name) for one in found.buckets)
    assert whole.good <= whole.ok
    assert whole.ttft.p50_ms <= whole.ttft.p95_ms <= whole.ttft.p99_ms <= whole.ttft.max_ms
    for one in (whole, *found.buckets):
        assert one.ttft.count == one.e2el.count == one.ok


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_percentiles_lie_between_ranks(values: list[float]) -> None:
    found = Distribution.of(values)
    ranked = np.sort(values) * 1e3
    for percent, value in ((50, found.p50_ms), (95, found.p95_ms), (99, found.p99_ms)):
        place = percent / 100 * (len(values) - 1)
        low, high = ranked[int(np.floor(place))], ranked[int(np.ceil(place))]
        assert low - 1e-6 <= value <= high + 1e-6


def test_bounds() -> None:
    assert parse_bounds("512,4096") == (512, 4096)
    assert parse_bounds("") == ()
    assert bucket_names(()) == ("all",)
    assert bucket_names((512,)) == ("<= 512", "> 512")
    assert [bucket_of(tokens, (512, 4096)) for tokens in (1, 512, 513, 4096, 4097)] == [
        0,
        0,
        1,
        1,
        2,
    ]
    for text in ("512,100", "a", "0,5", "5,5", "-1"):
        with pytest.raises(ConfigError):
            parse_bounds(text)
