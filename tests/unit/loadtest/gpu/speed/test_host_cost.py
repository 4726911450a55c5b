"""The host's work for a decode step, counted in calls and bytes."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
import torch

from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Fact
from loadtest.gpu.speed.host_cost import HostBench, host_cost_items, main, running

WARM, STEPS = 8, 32
BLOCK = 16


@dataclass(frozen=True)
class Counts:
    """Of one step."""

    engine_calls: float
    loop_calls: float
    input_bytes: float


async def count(batch: int, context: int, churn: int = 0) -> Counts:
    calls: Counter[str] = Counter()
    names: dict[int, str] = {}

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            calls[names.setdefault(threading.get_ident(), threading.current_thread().name)] += 1

    bench = HostBench(batch, context, churn, BLOCK, WARM + STEPS)
    threading.setprofile(profile)
    try:
        async with running(bench) as (counter, _):
            await counter.wait(WARM)
            before, first = calls["engine"], len(bench.model.sent_until) - 1
            sys.setprofile(profile)
            await counter.wait(STEPS)
            sys.setprofile(None)
            after, loop = calls["engine"], calls[threading.current_thread().name]
            # The engine is one or two steps ahead of the counter, so it counts its own.
            sent = bench.model.sent_until[first:]
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Counts((after - before) / STEPS, loop / STEPS, (sent[-1] - sent[0]) / (len(sent) - 1))


def test_another_sequence_costs_few_calls() -> None:
    few, many = (asyncio.run(count(batch, 200)) for batch in (32, 96))
    # One call adds a row's token and its draw.
    assert (many.engine_calls - few.engine_calls) / 64 < 1.5
    # About half of these make the message to the router.
    assert (many.loop_calls - few.loop_calls) / 64 < 20.0


def test_inputs_do_not_grow_with_the_context() -> None:
    short, long = (asyncio.run(count(64, context)) for context in (200, 4000))
    assert long.input_bytes < short.input_bytes * 1.05
    # 48 bytes a row, and 12 for each block; 250 blocks a row would take 64,000 bytes.
    assert long.input_bytes < 64 * (48 + 12)


def test_a_sequence_that_replaces_another_sends_its_own_table_only() -> None:
    steady, churning = (asyncio.run(count(64, 2000, churn)) for churn in (0, 1))
    assert churning.input_bytes - steady.input_bytes < 12 * 2 * (2000 // BLOCK)


def test_a_gpu_run_has_the_batches_as_items() -> None:
    place = Place(torch.device("cpu"), torch.float32, small=True)
    for item in host_cost_items(place):
        (found,) = item.work()
        assert isinstance(found, Fact)
        assert found.name == item.name
        assert found.values["engine_ms"] > 0


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    sizes = ["--batch", "4", "--context", "100", "--steps", "4"]
    assert main([*sizes, "--churn", "1", "--json", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| 4 | 100 | 1 |")
    assert json.loads(path.read_text())["4x100_churn1_message_bytes"] > 0
