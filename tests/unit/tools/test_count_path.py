"""What counts as run by a request, from what the processes of a cluster have recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tools.count_path import counts


def recorded(room: str, *more: tuple[str, str]) -> dict[str, Any]:
    own = [[f"{room}.main", "answer"], ["baton.hashing", "hash"], *map(list, more)]
    return {
        "functions": {"idle": [["baton.clock", "now"]], "request": [*own, ["baton.clock", "now"]]},
        "classes": {"idle": ["baton.clock.Tick"], "request": ["baton.clock.Tick", f"{room}.Made"]},
    }


ROOMS = ("router", "prefill_worker", "decode_worker")


def test_what_runs_anyway_does_not_count() -> None:
    found = counts([recorded(room) for room in ROOMS])
    assert list(found) == ["router", "prefill worker", "decode worker"]
    assert found["router"] == {
        "modules": ["baton.hashing", "router.main"],
        "functions": ["baton.hashing.hash", "router.main.answer"],
        "classes": ["router.Made"],
    }


def test_processes_without_a_part_in_the_request_are_left_out() -> None:
    idle = {"functions": {"idle": [["router.main", "poll"]]}, "classes": {}}
    found = counts([idle, *(recorded(room) for room in ROOMS)])
    assert "router.main.poll" not in found["router"]["functions"]


def test_a_role_that_is_missing_is_named() -> None:
    with pytest.raises(SystemExit, match="prefill worker"):
        counts([recorded("router"), recorded("decode_worker")])
