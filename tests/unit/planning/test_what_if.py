"""The simulator's answer to what a router asks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.config.cluster import Config
from baton.request import LoadSnapshot
from baton.store.registry import WorkerRecord
from planning.what_if import answers
from router.console.what_if import Shape, ShapeAnswer, WhatIfQuestion, present_shape, question
from router.routing.policies import make_policy
from router.routing.policy import RouteRequest, route_settings
from router.routing.routing_state import RoutingState
from tests.support.router.looks import record
from tests.support.router.what_if import WORKERS, recent
from tests.support.router.workers import list_worker


def asked(
    prefill: int,
    decode: int,
    *,
    rate: float = 1.0,
    count: int = 60,
    workers: Sequence[WorkerRecord] = WORKERS,
) -> WhatIfQuestion:
    return question(
        (present_shape(workers), Shape(prefill=prefill, decode=decode)),
        recent(count, output=40),
        workers,
        Config(),
        transfer_line=(2.0, 0.5),
        rate=rate,
        is_cpu=True,
    )


def answer(question: WhatIfQuestion) -> ShapeAnswer:
    """For the workers that are asked about."""
    _, found = answers(question)
    return found


def test_present_and_asked() -> None:
    present, other = answers(asked(2, 1))
    assert (present.prefill, present.decode, other.prefill, other.decode) == (1, 2, 2, 1)
    for one in (present, other):
        assert one.ttft_s.p50 is not None
        assert one.tpot_s.p95 is not None
        assert 0 < one.ttft_s.p50 < 1
        assert one.good_share == 1
        assert one.shed_share == 0
        assert one.prefill_busy is not None
        assert 0 < one.decode_busy < 1


def test_more_traffic_makes_workers_busier() -> None:
    calm, busy = answer(asked(1, 1)), answer(asked(1, 1, rate=5.0))
    assert calm.decode_busy < busy.decode_busy


def test_without_prefill_workers_decode_workers_do_both() -> None:
    alone = answer(asked(0, 1))
    assert alone.prefill_busy is None
    assert alone.ttft_s.p50 is not None


def hands_off(workers: Sequence[WorkerRecord]) -> bool:
    """Whether the real router hands a prompt of the recent traffic off while answers run."""
    config = Config()
    state = RoutingState(make_policy(config.policy, route_settings(config)), config.block_size)
    for one in workers:
        busy = LoadSnapshot(running=6 * (one.role == "decode"), free_blocks=900)
        list_worker(state.table, one, busy)
    request = RouteRequest(
        recent(1)[0].prompt_tokens, config.classes[0].name, kv_group=workers[0].kv_group
    )
    return not state.decide(request, (), {}, 0.0).local


@pytest.mark.parametrize("shares_cores", [False, True])
def test_prompts_go_where_the_real_router_sends_them(*, shares_cores: bool) -> None:
    workers = [replace(one, shares_cores=shares_cores) for one in WORKERS]
    present, other = answers(asked(2, 2, workers=workers, rate=20.0))
    assert hands_off(workers) == (not shares_cores)
    for one in (present, other):
        assert one.prefill_busy is not None
        assert (one.prefill_busy > 0) == hands_off(workers)


def test_only_workers_on_a_decode_workers_machine_get_no_prompts() -> None:
    apart = [
        record(slot, address=f"10.0.0.{place}:1", shares_cores=True)
        for slot, place in (("prefill-0", 1), ("prefill-1", 2), ("decode-0", 1))
    ]
    assert asked(2, 1, workers=apart).hosts == 2
    one, two = (answer(asked(prefill, 1, workers=apart, rate=20.0)) for prefill in (1, 2))
    assert one.prefill_busy == 0
    assert two.prefill_busy
    assert hands_off(apart)


def test_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "planning.what_if"],
        input=asked(2, 2).model_dump_json(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = map(ShapeAnswer.model_validate_json, done.stdout.splitlines())
    assert list(lines) == list(answers(asked(2, 2)))


def test_the_program_tells_what_it_cannot_do() -> None:
    bad = asked(1, 1)
    bad.profiles["decode"].pop("step")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "planning.what_if"],
        input=bad.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "lacks a field" in done.stderr
