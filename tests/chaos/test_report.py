from __future__ import annotations

import json
from dataclasses import replace

import pytest

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


def test_errors_of_several_faults_are_no_complaint() -> None:
    assert REPORT.complaints == []
    assert replace(REPORT, counts=Counts(requests=5, finished=4, errors=1)).complaints == []


@pytest.mark.parametrize(
    ("counts", "complaint"),
    [
        (Counts(requests=5, finished=4, lost=1), "1 requests lost"),
        (Counts(requests=5, finished=5, wrong_tokens=1), "1 wrong answers"),
        (
            Counts(requests=5, finished=4, errors=1, errors_single_fault=1),
            "1 errors with one fault or none",
        ),
        (
            Counts(requests=5, finished=5, retried=2, resets_unexplained=1),
            "1 connections reset, and no router ended",
        ),
        (Counts(requests=5, finished=4), "1 not counted"),
        (Counts(), "no request finished"),
    ],
)
def test_broken_promises_are_complaints(counts: Counts, complaint: str) -> None:
    assert replace(REPORT, counts=counts).complaints == [complaint]


def test_leaks_and_idle_victims_are_complaints() -> None:
    leaking = replace(ROUND, leaks=("decode-0: 1 used blocks",))
    assert replace(REPORT, rounds=(leaking,)).complaints == ["1 leaks"]
    idle = replace(REPORT, rounds=(replace(ROUND, streams=0),))
    assert idle.complaints == ["1 rounds whose victims had nothing to do"]


def test_too_few_faults_are_complaints() -> None:
    skipped = replace(REPORT, skipped={"clock an hour ahead": "there is no C compiler"})
    assert skipped.complaints == ["not made: clock an hour ahead: there is no C compiler"]
    assert replace(REPORT, min_rounds=2).complaints == ["1 rounds, expected 2"]
    found_before = replace(ROUND, kinds=(), leaks=("store: 2 keys a, at first 1",))
    only_before = replace(REPORT, rounds=(found_before,))
    assert only_before.complaints == [
        "1 leaks",
        "0 rounds, expected 1",
        "0 kinds of faults, expected 1",
    ]
    twice = replace(REPORT, rounds=(ROUND, ROUND), min_rounds=2, min_kinds=2)
    assert twice.complaints == ["1 kinds of faults, expected 2"]


def test_moves_and_drains_are_reported() -> None:
    drained = replace(ROUND, kinds=("decode drained",), drained_blocks=12)
    told = replace(REPORT, rounds=(ROUND, drained), moves={"drained": 2, "preempted": 1})
    fields = told.to_json()
    assert fields["moves"] == {"drained": 2, "preempted": 1}
    assert fields["drained_blocks"] == [12]
    assert fields["errors_without_spare"] == 0


def test_a_worker_that_outlives_its_cluster_fails_the_run() -> None:
    assert REPORT.complaints == []
    found = replace(REPORT, left=("process 5: ray::WorkerActor",))
    assert found.complaints == ["1 workers or supervisors that outlived the cluster"]
    assert found.to_json()["left"] == ["process 5: ray::WorkerActor"]
