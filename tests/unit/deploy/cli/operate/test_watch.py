"""What `baton status --watch` draws, in terminals of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from deploy.cli.operate.watch import Screen, draw
from router.console.rates import CounterWindow, Percentiles
from router.console.snapshot import LatencyView, Snapshot, snapshot_of
from tests.support.router.looks import CONFIG, look, seen


def snapshot(workers: int = 2) -> Snapshot:
    window = CounterWindow(60)
    window.add(0.0, {})
    names = ["prefill-0", *(f"decode-{number}" for number in range(workers - 1))]
    load: dict[str, Any] = {
        "running": 3,
        "waiting": 1,
        "used_blocks": 500,
        "cached_blocks": 250,
        "step_ms": 7.5,
    }
    seen_now = look(*(seen(name, **load) for name in names))
    found = snapshot_of(seen_now, window, CounterWindow(60), CONFIG)
    slow = LatencyView(Percentiles(9, 0.1, 30.0, 40.0), None)
    return replace(found, classes=(replace(found.classes[0], ttft=slow), *found.classes[1:]))


def drawn(found: Snapshot, width: int, height: int | None = None, complaint: str = "") -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(draw(found, Screen(width, height), complaint))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_it_fits(width: int) -> None:
    lines = drawn(snapshot(), width)
    assert max(len(line.rstrip()) for line in lines) <= width
    text = "\n".join(lines)
    for word in ("tiny", "ok", "requests", "handoffs", "TTFT p95", "30.0 s", "decode-0", "3/8"):
        assert word in text, word
    assert "…" not in text, "nothing is cut off"


def test_a_wide_one_shows_more() -> None:
    wide, narrow = ("\n".join(drawn(snapshot(), width)) for width in (120, 50))
    for word in ("TTFT p99", "ITL p95", "7.5 ms", "E2EL p50"):
        assert word in wide
        assert word not in narrow


def test_bars() -> None:
    found = snapshot()
    line = next(line for line in drawn(found, 120) if line.startswith("decode-0"))
    assert line.count("█") == 12 + 3, "half of the blocks are used; three of eight run"
    assert line.count("▓") == 6
    assert "50 %" in line
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(draw(found, Screen(120, has_blocks=False)))
    assert "█" not in captured.get()
    assert "#" * 12 + "+" * 6 in captured.get()


@pytest.mark.parametrize("width", [60, 120])
def test_many_workers_do_not_push_anything_off(width: int) -> None:
    lines = drawn(snapshot(100), width, height=24)
    assert len(lines) <= 24
    assert any(line.startswith("and ") and line.rstrip().endswith(" more") for line in lines)
    assert not any("more" in line for line in drawn(snapshot(3), width, height=24))


def test_why_there_is_nothing_newer() -> None:
    assert any("asking again" in line for line in drawn(snapshot(), 80, complaint="asking again"))
