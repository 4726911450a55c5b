"""The overload bench: its figures, and its client against the real HTTP front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from baton import errors
from baton.config.cluster import Config
from baton.request import FinishReason
from loadtest.cluster import overload
from loadtest.cluster.overload import Ending, Overload, Row, draw, load_of, percentile
from loadtest.common.peer_servers import SERVED_NAME
from planning.common.traces import Trace, TracedRequest
from router.core.request import GenerationRequest, OutputDelta
from router.core.served_model import ServedModel
from tests.support.router.front_fakes import CONTEXT, create_app, make_front

TRACE = Trace(tuple(TracedRequest(number * 0.01, 20, 3) for number in range(50)))


@pytest.mark.parametrize("factor", ["0", "-1"])
def test_a_load_of_nothing_is_refused(tmp_path: Path, factor: str) -> None:
    files = ["--model", str(tmp_path), "--trace", str(tmp_path / "trace.csv")]
    result = CliRunner().invoke(overload.app, [*files, "--factor", factor])
    assert result.exit_code == 2
    assert "0.01" in result.output


def test_figures() -> None:
    endings = [
        *(Ending("ok", 0.1 * number, 0.05) for number in range(1, 11)),
        Ending("ok", 2.5, 0.05),
        Ending("ok", 0.5, 0.2),
        Ending("refused", retry_after_s=1.5),
        Ending("failed"),
        Ending("hung"),
    ]
    load = load_of(endings, 5.0, Config(), 1)
    assert load.offered_per_s == 3.0
    assert load.goodput_per_s == 2.0
    counts = (load.ok, load.refused, load.refused_counted, load.failed, load.hung)
    assert counts == (12, 1, 1, 1, 1)
    assert load.ttft_p99_ms == 2500
    assert load.retry_after_p50_s == 1.5
    rows = (Row("slo", 0.5, load, 1.0), Row("queue", 3.0, load, 1.0))
    table = draw(Overload(load, rows, 2000.0, 100.0))
    assert table.row_count == 2


def test_percentiles() -> None:
    assert percentile([], 99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(n) for n in range(1, 101)], 99) == 99.0


async def drive(script: Any) -> overload.Load:
    front = make_front(script)
    model = ServedModel(SERVED_NAME, 0, CONTEXT, 8)
    app = create_app(front.dispatcher, front.tokenizer, model, front.stats, front.config)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as http:
        most = await overload._max_tokens(http)
        assert most == CONTEXT
        driver = overload._Driver(http, TRACE, front.config, most, lambda _: None)
        return await driver.run(100.0, 0.2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "_VOCABULARY", 300)


async def test_answers_and_refusals_are_distinguished() -> None:
    seen = 0

    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        nonlocal seen
        seen += 1
        if seen % 4 == 0:
            raise errors.DeadlineUnreachable("full", retry_after=1.25)
        if seen % 4 == 1:
            raise errors.BatonError("broken")
        yield OutputDelta("x", (65,), None)
        if seen == 6:
            raise errors.WorkerFailed("broke off")
        yield OutputDelta("x", (65,), FinishReason.LENGTH)

    load = await drive(script)
    assert (load.requests, load.refused, load.failed, load.hung) == (20, 5, 6, 0)
    assert load.refused_counted == 5
    assert load.retry_after_p50_s == 1.25
    assert load.ok == 9


async def test_what_hangs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "HANG_S", 0.05)

    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        await asyncio.Event().wait()
        yield OutputDelta("", (), None)

    load = await drive(script)
    assert load.hung == load.requests == 20
