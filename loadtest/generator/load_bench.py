"""Runs `baton bench serve` and `baton bench goodput`: from settings to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from rich.console import Console

from baton.errors import ConfigError
from loadtest.generator.load_report import LoadReport, show, write_records, write_report
from loadtest.generator.load_run import LoadRun, first_model, run_load
from loadtest.generator.load_settings import LoadSettings, make_traffic, open_trace
from loadtest.generator.rate_search import ATTAINMENT, PRECISION, RateSearch
from planning.common.plots import check_plots
from planning.common.report import this_machine, write_json
from planning.common.traces import Trace

Say = Callable[[str], None]
Drive = Callable[[LoadSettings, int], LoadRun]
"""Function that sends the load of the given settings once, and returns the results. The second
argument is the number of the run."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to which a report is written, in addition to the terminal."""

    json: Path | None = None
    html: Path | None = None
    records: Path | None = None
    """JSON Lines file with one record for each request."""

    def check(self) -> None:
        """Check that the report's files can be written. Call it before a run. Raises
        ConfigError."""
        if self.html is not None:
            check_plots()
        for path in (self.json, self.html, self.records):
            if path is not None:
                write_json(path, "")


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of the search for the highest request rate at which enough requests meet their
    SLOs."""

    first_rate: float = 1.0
    attainment: float = ATTAINMENT
    precision: float = PRECISION
    max_rate: float = float("inf")


def bench_serve(
    settings: LoadSettings,
    rates: Sequence[float],
    outputs: Outputs,
    console: Console,
    say: Say,
) -> LoadReport:
    """Run the load once at each of ``rates``, or once at the rate of ``settings`` if ``rates`` is
    empty. Raises BatonError."""
    outputs.check()
    settings, drive = _prepared(settings, console, say)
    runs: list[LoadRun] = []
    for number, rate in enumerate(rates or (settings.pace.rate,)):
        runs.append(drive(_at_rate(settings, rate), number))
        say(_line(runs[-1]))
        if runs[-1].stopped:
            break
    return tell(settings, make_report(settings, runs), outputs, console)


def bench_goodput(
    settings: LoadSettings, search: SearchSettings, outputs: Outputs, console: Console, say: Say
) -> LoadReport:
    """Search for the highest request rate at which enough requests meet their SLOs, and report it.
    Raises BatonError."""
    if settings.pace.concurrency is not None:
        raise ConfigError("a closed loop has no rate: goodput needs an open loop")
    if not settings.slo.bounds():
        raise ConfigError("goodput needs an SLO, as in --slo ttft=2,tpot=0.1")
    outputs.check()
    settings, drive = _prepared(settings, console, say)
    runs, rate = search_rate(settings, search, drive, say)
    report = replace(make_report(settings, runs), attainment=search.attainment, goodput_rate=rate)
    return tell(settings, report, outputs, console)


def search_rate(
    settings: LoadSettings, search: SearchSettings, drive: Drive, say: Say
) -> tuple[list[LoadRun], float]:
    """Return all runs of the search in order, and the highest request rate at which enough requests
    met their SLOs. The rate is 0 if there is none.
    """
    searching = RateSearch(
        search.first_rate,
        attainment=search.attainment,
        precision=search.precision,
        max_rate=search.max_rate,
    )
    runs: list[LoadRun] = []
    while (rate := searching.next_rate()) is not None:
        runs.append(drive(_at_rate(settings, rate), len(runs)))
        say(_line(runs[-1]))
        if runs[-1].stopped:
            break
        searching.tell(rate, runs[-1].summary.all.attainment)
    return runs, searching.best


def _prepared(settings: LoadSettings, console: Console, say: Say) -> tuple[LoadSettings, Drive]:
    """Complete the settings with the model's name, and read the trace. Return the completed
    settings, and a function that runs the load once.
    """
    trace: Trace | None = open_trace(settings.traffic)
    if not settings.server.model:
        server = replace(settings.server, model=first_model(settings.server))
        settings = replace(settings, server=server)

    def drive(load: LoadSettings, number: int) -> LoadRun:
        return uvloop.run(run_load(load, make_traffic(load, trace, number), console, say))

    return settings, drive


def _at_rate(settings: LoadSettings, rate: float | None) -> LoadSettings:
    return replace(settings, pace=replace(settings.pace, rate=rate))


def make_report(settings: LoadSettings, runs: Sequence[LoadRun]) -> LoadReport:
    """Make the report of these runs, with the present date and this machine."""
    return LoadReport(
        command=_title(settings),
        slo=settings.slo,
        machine=this_machine(),
        runs=tuple(runs),
        settings=settings.fields(),
    )


def _title(settings: LoadSettings) -> str:
    """Return a heading that describes the server and the load."""
    server, traffic, pace = settings.server, settings.traffic, settings.pace
    where = f"gRPC {server.grpc}" if server.grpc else f"{server.url} {server.endpoint}"
    if traffic.trace is not None:
        what = f"trace {traffic.trace.name}, lengths / {traffic.scale_length:g}"
    elif traffic.prompts is not None:
        what = f"prompts {traffic.prompts.name}, answers {traffic.outputs.text()}"
    else:
        what = f"prompts {traffic.inputs.text()}, answers {traffic.outputs.text()} tokens"
    if pace.concurrency is not None:
        how = "closed loop"
    else:
        how = pace.arrivals or ("poisson" if traffic.trace is None else "trace's arrivals")
    return f"{server.model or 'model'} at {where}: {what}; {how}"


def _line(run: LoadRun) -> str:
    found, whole = run.summary, run.summary.all
    return (
        f"{run.title}: {whole.ok} of {whole.requests} ok, {whole.attainment:.1%} good,"
        f" TTFT p50 {whole.ttft.p50_ms:.0f} ms p99 {whole.ttft.p99_ms:.0f} ms,"
        f" TPOT p50 {whole.tpot.p50_ms:.1f} ms p99 {whole.tpot.p99_ms:.1f} ms,"
        f" goodput {found.goodput_per_s:.2f}/s"
    )


def tell(
    settings: LoadSettings, report: LoadReport, outputs: Outputs, console: Console
) -> LoadReport:
    """Print the report, and write its files. Return the report. Raises ConfigError."""
    show(console, report)
    if outputs.json is not None:
        write_report(outputs.json, report)
    if outputs.records is not None:
        write_records(outputs.records, report.runs)
    if outputs.html is not None:
        from loadtest.generator.load_page import write_page  # noqa: PLC0415 - half a second

        write_page(outputs.html, report, settings.bounds)
    return report
