"""Shared by the tests of load report and by other tests."""

from __future__ import annotations

from array import array

from loadtest.generator.load_run import LoadRun
from loadtest.generator.metrics_timeline import Timeline
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import Distribution, Window, summarize
from planning.common.slo import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.15)


def make_run(rate: float, *, loop_lag_ms: float = 0.0) -> LoadRun:
    records = tuple(
        RequestRecord(
            number=number,
            due_s=number * 0.5,
            sent_s=number * 0.5,
            ended_s=number * 0.5 + 2,
            outcome="ok" if number % 5 else "shed",
            code="" if number % 5 else "overloaded",
            input_tokens=100 * (number + 1),
            output_tokens=3,
            token_times_s=array("d", [number * 0.5 + 0.1 * (number + 1) * k for k in (1, 2, 3)]),
        )
        for number in range(10)
    )
    series: dict[str, tuple[float, ...]] = {
        "baton_sequences decode running": (1.0, 2.0),
        "baton_kv_blocks decode used": (5.0, 6.0),
        "baton_waiting_requests": (0.0, 0.0),
    }
    return LoadRun(
        rate=rate,
        concurrency=None,
        summary=summarize(records, Window(0.0, 5.0), SLO, (512,)),
        loop_lag=Distribution.of([loop_lag_ms / 1e3]),
        client_core=0.1,
        timeline=Timeline((0.0, 1.0), series),
        records=records,
    )
