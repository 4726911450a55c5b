"""SLOs: what is read, and who meets them."""

from __future__ import annotations

import math
from array import array

import pytest

from baton.errors import ConfigError
from loadtest.generator.results.request_record import Outcome, RequestRecord
from planning.common.slo import Slo


def record(outcome: Outcome = "ok", tokens: int = 3) -> RequestRecord:
    """Due at 1, sent at 1.1, with tokens at 2, 2.25, 2.5."""
    times = array("d", [2.0 + 0.25 * number for number in range(tokens)])
    return RequestRecord(0, 1.0, 1.1, 3.0, outcome, output_tokens=tokens, token_times_s=times)


def test_forms() -> None:
    assert Slo.parse("ttft=2,tpot=0.1") == Slo(2.0, 0.1)
    assert Slo.parse("tpot=100ms, ttft=2s") == Slo(2.0, 0.1)
    assert Slo.parse("e2el=1e-1") == Slo(e2el_s=0.1)
    assert Slo.parse("ttft=2,tpot=50ms").text() == "TTFT <= 2 s, TPOT <= 50 ms"
    assert Slo().text() == "none"
    assert Slo(ttft_s=2.0).bounds() == {"ttft_s": 2.0}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "itl=1", "ttft=-1", "ttft=0", "ttft=1m", "ttft=1..2", "ttft=1,"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ConfigError):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_s=1.0, tpot_s=0.25, e2el_s=1.5), True),
        (Slo(ttft_s=0.95), False),
        (Slo(tpot_s=0.2), False),
        (Slo(e2el_s=1.4), False),
    ],
)
def test_times_count_from_the_intended_send(slo: Slo, *, met: bool) -> None:
    assert record().met(slo) is met


def test_a_single_token_has_no_gap_to_be_slow() -> None:
    assert record(tokens=1).met(Slo(tpot_s=1e-9))


@pytest.mark.parametrize("outcome", ["error", "shed", "aborted"])
def test_what_did_not_end_well_is_bad(outcome: Outcome) -> None:
    assert not record(outcome).met(Slo(math.inf))
