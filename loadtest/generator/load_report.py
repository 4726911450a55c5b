"""Writes the results of runs: tables, JSON, and the records of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.generator.load_run import LoadRun
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import BucketSummary, Distribution
from planning.common.report import Machine, print_whole, whole_table, write_json
from planning.common.slo import Slo


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report on all runs of one command."""

    command: str
    """Description of server and load, used as a heading."""
    slo: Slo
    machine: Machine
    """Machine on which the client ran."""
    runs: tuple[LoadRun, ...]
    attainment: float | None = None
    """Share of requests that must meet their SLOs at a rate, in a search for the highest such rate.
    None without a search."""
    goodput_rate: float | None = None
    """Highest request rate per second at which enough requests met their SLOs. 0 if the search
    found none; None without a search."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All settings of the load, for the JSON report."""

    def fields(self) -> dict[str, Any]:
        """Return the report's fields for JSON, without the records of requests. `write_records`
        writes those.
        """
        fields: dict[str, Any] = {
            "command": self.command,
            "settings": dict(self.settings),
            "machine": asdict(self.machine),
            "slo": self.slo.bounds(),
            "runs": [_run_fields(run) for run in self.runs],
        }
        if self.attainment is not None:
            fields |= {"attainment": self.attainment, "goodput_rate": self.goodput_rate}
        return fields

    def verdict(self) -> str:
        """Describe the result of the search for the highest rate; empty without a search."""
        if self.attainment is None:
            return ""
        if not self.goodput_rate:
            return f"No rate was found at which {self.attainment:.0%} meet {self.slo.text()}."
        return (
            f"Goodput: {self.goodput_rate:g} requests/s is the highest rate at which"
            f" {self.attainment:.0%} meet {self.slo.text()}."
        )


def _run_fields(run: LoadRun) -> dict[str, Any]:
    return {
        "rate": run.rate,
        "concurrency": run.concurrency,
        "summary": asdict(run.summary),
        "loop_lag": asdict(run.loop_lag),
        "client_core": run.client_core,
        "warnings": list(run.warnings),
        "timeline": asdict(run.timeline),
    }


def write_report(path: Path, report: LoadReport) -> None:
    """Write the report as JSON. Raises ConfigError if that fails."""
    write_json(path, json.dumps(report.fields(), indent=1) + "\n")


def write_records(path: Path, runs: Sequence[LoadRun]) -> None:
    """Write a JSON object per line for each request. Raises ConfigError if that fails."""
    lines = (
        json.dumps({"run": number, **_record_fields(record)}) + "\n"
        for number, run in enumerate(runs)
        for record in run.records
    )
    write_json(path, "".join(lines))


def _record_fields(record: RequestRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "ended_s": record.ended_s,
        "outcome": record.outcome,
        "code": record.code,
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "token_times_s": record.token_times_s.tolist(),
    }


def show(console: Console, report: LoadReport) -> None:
    """Print the report's tables, its warnings, and the machine."""
    print_whole(console, rates_table(report.runs))
    for run in report.runs if report.attainment is None else _best(report):
        print_whole(console, latency_table(run))
    for run in report.runs:
        for warning in run.warnings:
            _line(console, f"warning: {run.title}: {warning}.")
        if run.summary.codes:
            codes = ", ".join(f"{count} {code}" for code, count in run.summary.codes.items())
            _line(console, f"{run.title}: failed requests: {codes}.")
    for line in (report.verdict(), f"SLO: {report.slo.text()}. {report.machine.line()}."):
        if line:
            _line(console, line)


def _best(report: LoadReport) -> list[LoadRun]:
    return [run for run in report.runs if run.rate == report.goodput_rate][-1:]


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def rates_table(runs: Sequence[LoadRun]) -> Table:
    """Return a table with a row for each run. A row has the offered load and the results of the
    run."""
    table = whole_table(
        *("load", "requests", "ok", "error", "shed", "aborted", "offered/s", "ok/s", "goodput/s"),
        *("attainment", "tokens in/s", "tokens out/s", "TTFT p50, ms", "p99", "TPOT p50, ms"),
        *("p99", "send lag p99, ms"),
        title="",
    )
    for run in sorted(runs, key=lambda run: run.rate or 0.0):
        found, whole = run.summary, run.summary.all
        table.add_row(
            run.title,
            *map(str, (whole.requests, whole.ok, whole.error, whole.shed, whole.aborted)),
            f"{found.offered_per_s:.2f}",
            f"{found.completed_per_s:.2f}",
            f"{found.goodput_per_s:.2f}",
            f"{whole.attainment:.1%}",
            f"{found.input_tokens_per_s:.0f}",
            f"{found.output_tokens_per_s:.0f}",
            *(f"{whole.ttft.p50_ms:.0f}", f"{whole.ttft.p99_ms:.0f}"),
            *(f"{whole.tpot.p50_ms:.1f}", f"{whole.tpot.p99_ms:.1f}"),
            f"{found.lag.p99_ms:.1f}",
        )
    return table


def latency_table(run: LoadRun) -> Table:
    """Return a table of latency percentiles. It has one row for each measure, such as TTFT, and
    each bucket of input lengths."""
    table = whole_table(
        *("input tokens", "measure", "requests", "attainment", "mean, ms", "p50", "p95", "p99"),
        title=run.title,
    )
    for bucket, name, found in latency_rows(run):
        table.add_row(
            bucket.name,
            name,
            str(bucket.requests),
            f"{bucket.attainment:.1%}",
            *(f"{one:.1f}" for one in (found.mean_ms, found.p50_ms, found.p95_ms, found.p99_ms)),
        )
    return table


def latency_rows(run: LoadRun) -> Iterator[tuple[BucketSummary, str, Distribution]]:
    """Yield the latency measures of all requests, then those of each bucket of input lengths if
    there are several buckets."""
    buckets = run.summary.buckets if len(run.summary.buckets) > 1 else ()
    for bucket in (run.summary.all, *buckets):
        yield bucket, "TTFT", bucket.ttft
        yield bucket, "TPOT", bucket.tpot
        yield bucket, "ITL", bucket.itl
        yield bucket, "E2EL", bucket.e2el
