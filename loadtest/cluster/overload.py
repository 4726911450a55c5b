"""Measures goodput and latency of each admission mode, below capacity and far above it.

    python -m loadtest.cluster.overload --model FOLDER --trace FILE

It first finds the capacity: the maximum goodput at a few rising rates. Then it offers shares and
multiples of that rate for a minute each, to a cluster of each mode. Prompts are random tokens with
the lengths of a recorded trace, and arrive in its pattern, but faster. Client and cluster share the
machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from baton.config.cluster import Config
from baton.errors import Unavailable
from loadtest.common.bench_app import Figures, ModelFolder, bench_app, say
from loadtest.common.child_processes import LOOPBACK, free_port
from loadtest.common.peer_servers import SERVED_NAME, Programs, Server, serving
from loadtest.handoff.handoff_bench import random_prompt
from planning.common.report import print_whole, this_machine, whole_table, write_json
from planning.common.traces import Trace, TracedRequest, read_trace

Say = Callable[[str], None]
Kind = Literal["ok", "refused", "failed", "hung"]
Mode = Literal["queue", "slo"]
MODES: tuple[Mode, ...] = ("slo", "queue")
"""Admission modes to compare. The capacity is measured in the first mode, which keeps requests
within their SLOs."""

HANG_S = 120.0
"""Seconds after which a request counts as hanging if it has neither ended nor been rejected."""
_REFUSALS = (429, 503)
_FIRST_RATE = 2.0
_RATE_STEP = 1.5
_FELL_BEHIND = 0.75
"""If fewer than this share of requests meet their SLOs, the offered rate exceeds the capacity."""
_WARM_UP_S = 5.0
_VOCABULARY = 2000
"""Upper bound of the token ids in prompts. In every vocabulary, ids below it are ordinary
tokens."""


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """Settings of a measurement of overload."""

    trace: Path
    scale_length: float
    """Number by which the lengths of the trace's prompts and answers are divided."""
    factors: tuple[float, ...]
    """Offered loads, as multiples of the measured capacity."""
    seconds: float
    probe_seconds: float
    """Duration of each tried rate in the search for the capacity, in seconds."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The outcome of one request, with its times by the client's clock."""

    kind: Kind
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    retry_after_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """One offered rate, and the results of its requests."""

    offered_per_s: float
    requests: int
    goodput_per_s: float
    """Goodput: the requests that met both SLOs, divided by the seconds in which requests
    arrived."""
    ok: int
    refused: int
    refused_counted: int
    """Number of rejected requests that the router's metrics report."""
    failed: int
    hung: int
    ttft_p50_ms: float
    """Median TTFT of admitted requests, in milliseconds."""
    ttft_p99_ms: float
    tpot_p99_ms: float
    retry_after_p50_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One offered load in one admission mode."""

    mode: Mode
    factor: float
    load: Load
    share: float
    """Goodput at this load, as a share of the capacity."""


@dataclass(frozen=True, slots=True)
class Overload:
    """Results of the measurement in all admission modes."""

    capacity: Load
    rows: tuple[Row, ...]
    slo_ttft_ms: float
    slo_tpot_ms: float


def bench_overload(
    settings: OverloadSettings, programs: Programs, say: Say, console: Console, output: Path | None
) -> None:
    """Measure all modes, print the table, and write all results to ``output`` as JSON. Raises
    BatonError.

    Raises ConfigError before the measurement if a file cannot be read or written.
    """
    trace = read_trace(settings.trace, scale_length=settings.scale_length)
    if output is not None:
        write_json(output, "{}\n")
    found: Overload | None = None
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for mode in MODES:
            port, grpc = free_port(), free_port()
            command = (
                *(str(programs.baton), "serve", "--model", str(programs.model)),
                *("--served-model-name", SERVED_NAME, "--admission", mode),
                *("--http", f"{LOOPBACK}:{port}", "--grpc", f"{LOOPBACK}:{grpc}"),
            )
            server = Server("baton", "bf16", command, port)
            with serving(server, Path(folder) / f"{mode}.log") as seconds:
                say(f"{mode}: ready after {seconds:.1f} s")
                found = asyncio.run(measure(settings, trace, server.base_url, say, mode, found))
    assert found is not None
    machine = this_machine()
    print_whole(console, draw(found))
    line = f"Capacity: {found.capacity.goodput_per_s:.1f} good requests/s."
    console.print(f"{line} {machine.line()}.", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        fields = {"machine": asdict(machine), **asdict(found)}
        write_json(output, json.dumps(fields, indent=1) + "\n")


async def measure(
    settings: OverloadSettings,
    trace: Trace,
    base_url: str,
    say: Say,
    mode: Mode,
    before: Overload | None,
) -> Overload:
    """Measure the admission mode of the cluster at ``base_url``, which has the default SLOs.

    ``before`` has the capacity and the rows of modes that were measured before. If ``before`` is
    None, the capacity is searched first. Raises Unavailable if no request succeeds.
    """
    config = Config()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    async with httpx.AsyncClient(
        base_url=base_url, trust_env=False, timeout=2 * HANG_S, limits=limits
    ) as http:
        driver = _Driver(http, trace, config, await _max_tokens(http), say)
        await driver.run(_FIRST_RATE, _WARM_UP_S)
        capacity = await _find_capacity(driver, settings) if before is None else before.capacity
        capacity_per_s = capacity.goodput_per_s
        rows = () if before is None else before.rows
        for factor in settings.factors:
            load = await driver.run(factor * capacity_per_s, settings.seconds)
            rows += (Row(mode, factor, load, load.goodput_per_s / capacity_per_s),)
    return Overload(capacity, rows, config.slo_ttft_s * 1e3, config.slo_tpot_s * 1e3)


async def _find_capacity(driver: _Driver, settings: OverloadSettings) -> Load:
    capacity, rate = None, _FIRST_RATE
    while True:
        load = await driver.run(rate, settings.probe_seconds)
        if capacity is None or load.goodput_per_s > capacity.goodput_per_s:
            capacity = load
        if load.goodput_per_s < _FELL_BEHIND * load.offered_per_s:
            break
        rate *= _RATE_STEP
    if not capacity.goodput_per_s:
        raise Unavailable("no request met the SLOs")
    return capacity


class _Driver:
    """Sends requests in an open loop: on schedule, independent of earlier responses."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        trace: Trace,
        config: Config,
        max_tokens: int,
        say: Say,
    ) -> None:
        self._http = http
        self._trace = trace
        self._config = config
        self._max_tokens = max_tokens
        self._say = say
        self._dice = random.Random(0)  # noqa: S311 - prompts, no secret

    async def run(self, rate: float, seconds: float) -> Load:
        """Offer ``rate`` requests per second for ``seconds``, and wait until all requests have
        ended."""
        before = await self._shed()
        # Each run starts at the same row, since pieces of a trace differ by more than rates do.
        arrivals = list(self._trace.at_rate(rate, seconds))
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for arrival in arrivals:
                await asyncio.sleep(began + arrival.arrival_s - time.monotonic())
                tasks.append(group.create_task(self._ask(arrival)))
        endings = [task.result() for task in tasks]
        load = load_of(endings, seconds, self._config, await self._shed() - before)
        self._say(
            f"{load.offered_per_s:.1f} requests/s: {load.goodput_per_s:.1f} good, TTFT p99"
            f" {load.ttft_p99_ms:.0f} ms, {load.refused} refused, {load.failed} failed,"
            f" {load.hung} hung"
        )
        return load

    async def _ask(self, arrival: TracedRequest) -> Ending:
        answer = min(arrival.output_tokens, self._max_tokens // 2)
        prompt = min(arrival.input_tokens, self._max_tokens - answer - 1)
        body = {
            "model": SERVED_NAME,
            "prompt": random_prompt(self._dice, prompt, _VOCABULARY),
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        try:
            async with asyncio.timeout(HANG_S):
                return await self._answer(body, answer)
        except TimeoutError:
            return Ending("hung", reason=f"not finished after {HANG_S:g} s")
        except httpx.HTTPError as error:
            return Ending("failed", reason=type(error).__name__)

    async def _answer(self, body: dict[str, object], tokens: int) -> Ending:
        began = time.monotonic()
        first = last = 0.0
        ended = False
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                return await _refusal(response)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    last = time.monotonic()
                    first = first or last
        if not ended:
            return Ending("failed", reason="the stream failed")
        return Ending("ok", first - began, (last - first) / max(1, tokens - 1))

    async def _shed(self) -> int:
        """Return the number of requests that the router has shed, by its metrics."""
        page = (await self._http.get("/metrics")).text
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(page)
            if family.name == "baton_requests"
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels["outcome"] == "shed"
        )


async def _max_tokens(http: httpx.AsyncClient) -> int:
    """Return the maximum number of tokens that the cluster accepts for a prompt and its answer
    together."""
    models = (await http.get("/v1/models")).json()
    return int(models["data"][0]["max_model_len"])


async def _refusal(response: httpx.Response) -> Ending:
    body = await response.aread()
    if response.status_code not in _REFUSALS or "retry-after" not in response.headers:
        return Ending("failed", reason=f"{response.status_code}: {body[:200].decode()}")
    after_ms = response.headers.get("retry-after-ms")
    after_s = float(response.headers["retry-after"]) if after_ms is None else int(after_ms) / 1e3
    return Ending("refused", retry_after_s=after_s, reason=str(response.status_code))


def load_of(endings: Sequence[Ending], seconds: float, config: Config, counted: int) -> Load:
    """Return the results at one offered rate. Requests arrived for ``seconds`` seconds; ``counted``
    is the number of rejections that the router reports.
    """
    kinds = [ending.kind for ending in endings]
    well = [ending for ending in endings if ending.kind == "ok"]
    good = [
        ending
        for ending in well
        if ending.ttft_s <= config.slo_ttft_s and ending.tpot_s <= config.slo_tpot_s
    ]
    refused = [ending.retry_after_s for ending in endings if ending.kind == "refused"]
    return Load(
        offered_per_s=len(endings) / seconds,
        requests=len(endings),
        goodput_per_s=len(good) / seconds,
        ok=len(well),
        refused=len(refused),
        refused_counted=counted,
        failed=kinds.count("failed"),
        hung=kinds.count("hung"),
        ttft_p50_ms=1e3 * percentile([ending.ttft_s for ending in well], 50),
        ttft_p99_ms=1e3 * percentile([ending.ttft_s for ending in well], 99),
        tpot_p99_ms=1e3 * percentile([ending.tpot_s for ending in well], 99),
        retry_after_p50_s=percentile(refused, 50),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest rank: the smallest of ``values`` that at least ``percent``
    percent of ``values`` do not exceed. Return 0 without values.
    """
    if not values:
        return 0.0
    place = max(1, -(-len(values) * percent // 100))
    return sorted(values)[int(place) - 1]


def draw(found: Overload) -> Table:
    """Return a table with a row for each offered load in each admission mode."""
    table = whole_table(
        *("mode", "of capacity", "offered/s", "good/s", "TTFT p50, ms", "p99", "TPOT p99, ms"),
        *("refused", "counted", "failed", "hung", "Retry-After p50, s"),
        title="Goodput and latency by admission mode and load",
    )
    for row in found.rows:
        load = row.load
        table.add_row(
            row.mode,
            f"{row.factor:g}",
            f"{load.offered_per_s:.1f}",
            f"{load.goodput_per_s:.1f}",
            f"{load.ttft_p50_ms:.0f}",
            f"{load.ttft_p99_ms:.0f}",
            f"{load.tpot_p99_ms:.1f}",
            *(str(load.refused), str(load.refused_counted), str(load.failed), str(load.hung)),
            f"{load.retry_after_p50_s:.2f}",
        )
    return table


def main(
    model: ModelFolder,
    trace: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Trace in Azure's format: CSV, plain or .gz."),
    ],
    scale_length: Annotated[
        float, typer.Option(min=1, help="Divide the trace's lengths by this.")
    ] = 8.0,
    factor: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            help="Load as a multiple of the measured capacity; repeatable. Default: 0.5, 1, 3.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds per load.")] = 60.0,
    probe_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds per rate while the capacity is searched.")
    ] = 20.0,
    output: Figures = None,
) -> None:
    """Compare the admission modes below and above capacity."""
    factors = tuple(factor or (0.5, 1.0, 3.0))
    settings = OverloadSettings(trace, scale_length, factors, seconds, probe_seconds)
    bench_overload(settings, Programs(model), say, Console(), output)


app = bench_app(main)

if __name__ == "__main__":
    app()
