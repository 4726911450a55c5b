"""The simulator's answer to what a router asks."""

from __future__ import annotations

import subprocess
import sys

from baton.config.cluster import Config
from planning.what_if import answer
from router.console.what_if import WhatIfAnswer, WhatIfQuestion, WhatIfRequest, question
from tests.support.router.what_if import WORKERS, recent


def asked(prefill: int, decode: int, *, rate: float = 1.0, count: int = 60) -> WhatIfQuestion:
    return question(
        WhatIfRequest(prefill=prefill, decode=decode, rate=rate),
        recent(count, output=40),
        WORKERS,
        Config(),
        transfer_line=(2.0, 0.5),
        is_cpu=True,
    )


def test_present_and_asked() -> None:
    found = answer(asked(2, 1))
    present, other = found.shapes
    assert (present.prefill, present.decode, other.prefill, other.decode) == (1, 2, 2, 1)
    assert (found.requests, found.seconds) == (60, 59.0)
    for one in found.shapes:
        assert one.ttft_s.p50 is not None
        assert one.tpot_s.p95 is not None
        assert 0 < one.ttft_s.p50 < 1
        assert one.good_share == 1
        assert one.shed_share == 0
        assert one.prefill_busy is not None
        assert 0 < one.decode_busy < 1


def test_more_traffic_makes_workers_busier() -> None:
    calm, busy = answer(asked(1, 1)).shapes[1], answer(asked(1, 1, rate=5.0)).shapes[1]
    assert calm.decode_busy < busy.decode_busy


def test_without_prefill_workers_decode_workers_do_both() -> None:
    alone = answer(asked(0, 1)).shapes[1]
    assert alone.prefill_busy is None
    assert alone.ttft_s.p50 is not None


def test_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "planning.what_if"],
        input=asked(2, 2).model_dump_json(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert WhatIfAnswer.model_validate_json(done.stdout) == answer(asked(2, 2))


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
