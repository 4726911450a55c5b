"""What a reloaded page shows: bounded, and no more than ten minutes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from router.console import history
from router.console.history import COLUMN_S, KEPT_S, POINT_S, History
from router.console.rates import CounterWindow
from router.console.snapshot import ObservedWorker, Snapshot, snapshot_of
from router.http.sse import to_json
from tests.support.router.looks import CONFIG, look, seen


def at(seconds: float, *workers: ObservedWorker) -> Snapshot:
    made = snapshot_of(look(*workers), CounterWindow(60), CounterWindow(60), CONFIG)
    return replace(made, at=seconds)


def test_points_are_thinned_and_forgotten() -> None:
    kept = History()
    for second in range(1000):
        kept.add(at(10_000.0 + second))
    points = kept.shown()["points"]
    assert len(points) == KEPT_S / POINT_S
    assert (points[0]["at"], points[-1]["at"]) == (10_400.0, 10_998.0)
    assert {"requests_per_s", "ttft_p95_s", "waiting"} <= points[0].keys()
    columns = kept.shown()["columns"]
    assert len(columns) == KEPT_S / COLUMN_S
    assert columns[-1]["at"] == 10_990.0


def test_a_column_has_the_means_of_each_worker() -> None:
    kept = History()
    kept.add(at(100.0, seen(running=8, used_blocks=500, step_ms=10.0)))
    kept.add(at(101.0, seen(running=4, used_blocks=0, step_ms=20.0)))
    kept.add(at(110.0, seen("decode-1", running=2)))
    first, second = kept.shown()["columns"]
    assert first == {"at": 100.0, "workers": {"decode-0": (2, 0.75, 0.25, 15.0)}}
    assert second == {"at": 110.0, "workers": {"decode-1": (1, 0.25, 0.0, 0.0)}}
    json.loads(to_json(kept.shown()), parse_constant=pytest.fail)


def test_workers_of_a_column_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_WORKERS", 2)
    kept = History()
    kept.add(at(100.0, *(seen(f"decode-{number}") for number in range(3))))
    kept.add(at(101.0, *(seen(f"decode-{number}") for number in (2, 0))))
    (column,) = kept.shown()["columns"]
    assert column["workers"].keys() == {"decode-0", "decode-1"}
    assert column["workers"]["decode-0"][0] == 2
