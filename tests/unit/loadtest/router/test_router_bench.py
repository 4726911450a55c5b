"""Figures of `loadtest.router.router_bench`; a run of it is in tests/integration."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from baton.errors import ConfigError
from loadtest.common.child_processes import pinned
from loadtest.router.router_bench import (
    SGLANG_ROUTER,
    Latencies,
    Rate,
    RouterBenchSettings,
    RouterFigures,
    as_json,
    draw,
    draw_rates,
)
from loadtest.router.router_process import check_command
from planning.common.report import print_whole, this_machine

THROUGH = Latencies(2.5, 5.5, 160.0, 170.0, 0.4, 2.0)
DIRECT = Latencies(1.0, 2.0, 150.0, 155.0, 0.01, 0.05)
KEPT = Rate(20000.0, 19950.0, 1.01, 0.6, 30.1, kept_up=True)
FELL_BEHIND = Rate(50000.0, 43000.0, 0.9, 1.0, 23.3, kept_up=False)
FIGURES = RouterFigures(THROUGH, DIRECT, (KEPT, FELL_BEHIND))


def test_the_json_has_differences_and_the_highest_rate_that_was_kept() -> None:
    settings = RouterBenchSettings(Path("/models/some-model"))
    found = json.loads(as_json(this_machine(), settings, FIGURES))
    assert found["added_ms_p50"] == pytest.approx(1.5)
    assert found["added_ms_p99"] == pytest.approx(3.5)
    assert found["end_added_ms_p50"] == pytest.approx(10)
    assert found["end_added_ms_p99"] == pytest.approx(15)
    assert found["tokens_per_s"] == 19950
    assert found["settings"]["model"] == "some-model", "no path of this machine"
    assert len(found["rates"]) == 2


def test_a_router_that_keeps_up_with_nothing_has_no_rate() -> None:
    assert dataclasses.replace(FIGURES, rates=(FELL_BEHIND,)).tokens_per_s == 0


def test_the_tables() -> None:
    console = Console(width=200, record=True)
    print_whole(console, draw(FIGURES))
    print_whole(console, draw_rates(FIGURES.rates))
    text = console.export_text()
    assert "added" in text
    assert "1.50" in text
    assert "43000" in text
    assert "30.1" in text


def test_a_peer_is_shown_next_to_it() -> None:
    settings = RouterBenchSettings(Path("/models/some-model"), peer="x {backend} {port}")
    peer = dataclasses.replace(FIGURES, through=DIRECT)
    found = json.loads(as_json(this_machine(), settings, FIGURES, peer))
    assert found["peer"]["added_ms_p50"] == 0
    assert found["added_ms_p50"] == pytest.approx(1.5)


@pytest.mark.parametrize("command", ["", "router --port {port}", "router {backend}"])
def test_a_peers_command_says_where_its_backend_and_port_go(command: str) -> None:
    with pytest.raises(ConfigError, match="must have"):
        check_command(command)


def test_the_command_of_sglangs_router_is_a_peers() -> None:
    command = SGLANG_ROUTER.format(python="/venv/bin/python")
    check_command(command)
    assert command.startswith("/venv/bin/python -m sglang_router.launch_router ")


def test_pinning_ends() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pinned(core):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
