from __future__ import annotations

import json
from dataclasses import replace

from tests.chaos.load.ledger import Counts
from tests.chaos.report import Report, RoundReport

ROUND = RoundReport(("decode killed",), ("decode-0",), 2, 0.0, 1.0, 0.5, 8.0, ())
REPORT = Report(7, 3.0, Counts(requests=5, finished=5), (ROUND,), {}, ())
NAMES = {
    *("requests", "finished", "errors", "errors_single_fault", "lost", "wrong_tokens", "leaks"),
    *("faults", "recovery_s_p50", "recovery_s_p99"),
}


def test_the_file_has_what_is_promised() -> None:
    fields = json.loads(json.dumps(REPORT.to_json()))
    assert set(fields) >= NAMES
    assert fields["faults"] == {"decode killed": 1}
    assert fields["leaks"] == 0
    assert Report(7, 3.0, Counts(), (), {}, ()).to_json()["recovery_s_p50"] is None


def test_recovery_is_the_longer_of_what_clients_feel() -> None:
    slow = tuple(replace(ROUND, streams_s=float(number)) for number in range(1, 101))
    fields = replace(REPORT, rounds=(replace(ROUND, answered_s=200.0), *slow)).to_json()
    assert fields["recovery_s_p50"] == 51.0
    assert fields["recovery_s_p99"] == 100.0


def test_only_errors_with_several_faults_are_allowed() -> None:
    assert REPORT.is_clean
    assert replace(REPORT, counts=Counts(requests=5, finished=4, errors=1)).is_clean
    for counts in (Counts(lost=1), Counts(wrong_tokens=1), Counts(errors=1, errors_single_fault=1)):
        assert not replace(REPORT, counts=counts).is_clean
    assert not replace(
        REPORT, rounds=(replace(ROUND, leaks=("decode-0: 1 used blocks",)),)
    ).is_clean


def test_moves_and_drains_are_told() -> None:
    drained = replace(ROUND, kinds=("decode drained",), drained_blocks=12)
    told = replace(REPORT, rounds=(ROUND, drained), moves={"drained": 2, "preempted": 1})
    fields = told.to_json()
    assert fields["moves"] == {"drained": 2, "preempted": 1}
    assert fields["drained_blocks"] == [12]
    assert fields["errors_without_spare"] == 0
