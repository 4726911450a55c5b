"""The report of a run: what counts as wrong, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.gpu import report
from loadtest.gpu.common.results import Check, Timing
from loadtest.gpu.report import Report, finished, table, wrong

NAN = float("nan")
RUN = {"kind": "run", "device": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "date": "a day"}
PLACE = {"phase": "step speed", "item": "one"}


def test_a_check_that_is_not_a_number_does_not_hold() -> None:
    assert Check("", 0.1, 0.1).holds
    assert not Check("", 0.2, 0.1).holds
    assert not Check("", NAN, 0.1).holds
    record = {**PLACE, **Check("a kernel", NAN, 0.1).record()}
    assert wrong([record]) == [record]
    assert "| a kernel | not a number | 0.1 |" in table([record])


def test_a_line_is_json_whatever_the_error_is(tmp_path: Path) -> None:
    found = Report(tmp_path / "gpu.jsonl")
    for error in (NAN, float("inf"), 0.5):
        found.append(Check("", error, 0.1).record())
    assert [record["error"] for record in found.records()] == [None, None, 0.5]
    assert "NaN" not in (tmp_path / "gpu.jsonl").read_text()


def test_a_broken_item_and_an_exceeded_bound_are_wrong() -> None:
    late = {**PLACE, **Timing("wait", 2.1, limit_s=2.0).record()}
    in_time = {**PLACE, **Timing("wait", 1.9, limit_s=2.0).record()}
    broken = {"kind": "broken", **PLACE, "why": "its process ended with -6"}
    assert wrong([late, in_time, broken]) == [late, broken]


def test_broken_and_done_items_are_finished() -> None:
    kinds = ("begun", "done", "broken", "check")
    records = [{"kind": kind, "phase": "steps", "item": kind} for kind in kinds]
    assert finished(records, "steps") == {"done", "broken"}
    assert finished(records, "kernels") == set()


def test_half_a_line_is_neither_read_nor_continued(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    found = Report(path)
    found.append(RUN)
    with path.open("ab") as file:
        file.write(b'{"kind": "che')
    found.mend()
    found.append({"kind": "done", **PLACE})
    assert [record["kind"] for record in found.records()] == ["run", "done"]


def test_times_are_shown_next_to_predictions_and_peers() -> None:
    timing = Timing("decode 1 × 1k", 0.005, "vLLM", 0.004)
    records = [RUN, {**PLACE, **timing.record()}, {"kind": "done", **PLACE}]
    rows = [line for line in table(records).splitlines() if line.startswith("| decode 1 × 1k |")]
    assert len(rows) == 1
    name, floor, expected, measured, ratio, peer, peer_ms, over = rows[0].strip("| ").split(" | ")
    assert (name, measured, peer, peer_ms, over) == (
        "decode 1 × 1k",
        "5.000",
        "vLLM",
        "4.000",
        "1.25",
    )
    assert float(floor) < float(expected)
    assert float(ratio) == pytest.approx(5.0 / float(expected), abs=0.01)


def test_a_device_without_predictions_has_none() -> None:
    records = [RUN | {"device": "CPU"}, {**PLACE, **Timing("decode 1 × 1k", 0.005).record()}]
    assert "| decode 1 × 1k |  |  | 5.000 |  |  |  |  |" in table(records)


def test_a_file_that_is_no_report_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.txt"
    path.write_text("nothing\n")
    assert report.main([str(path)]) == 2
    assert "is not a report" in capsys.readouterr().err
