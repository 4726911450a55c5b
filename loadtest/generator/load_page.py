"""Shows the report as one self-contained HTML page: figures, and plots as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from loadtest.generator.load_report import LoadReport, latency_rows
from loadtest.generator.load_run import LoadRun
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import bucket_names, bucket_of
from planning.common.plots import Line, Mark, cdf, draw_lines
from planning.common.report import write_json

_TEMPLATE = "load_page.html"


def write_page(path: Path, report: LoadReport, bounds: Sequence[int]) -> None:
    """Write the report's HTML page. The report shows requests by input length; ``bounds`` are the
    upper bounds of the buckets, in tokens. Raises ConfigError if the file cannot be written.
    """
    write_json(path, page(report, bounds))


def page(report: LoadReport, bounds: Sequence[int]) -> str:
    """Return the report's whole HTML page. The report shows requests by input length; ``bounds``
    are the upper bounds of the buckets, in tokens.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("loadtest.generator", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [_section(run, report, bounds) for run in report.runs]
    overview = _goodput_plots(report) if len({run.rate for run in report.runs}) > 1 else []
    return environment.get_template(_TEMPLATE).render(
        report=report, sections=sections, overview=overview
    )


def _section(run: LoadRun, report: LoadReport, bounds: Sequence[int]) -> dict[str, Any]:
    return {
        "run": run,
        "rows": list(latency_rows(run)),
        "plots": [*_distributions(run, report, bounds), *_timelines(run)],
    }


def _distributions(run: LoadRun, report: LoadReport, bounds: Sequence[int]) -> list[str]:
    well = [record for record in run.records if record.outcome == "ok"]
    parts = {"all": well} | _by_bucket(well, bounds)
    ttft = {name: [1e3 * one.ttft_s for one in part] for name, part in parts.items()}
    tpot = {
        name: [1e3 * one.tpot_s for one in part if one.output_tokens > 1]
        for name, part in parts.items()
    }
    return [
        draw_lines(
            {name: cdf(values) for name, values in series.items() if values},
            title=f"{measure}, {run.title}, by input tokens",
            x="milliseconds",
            y="share of requests",
            marks=[] if bound == math.inf else [Mark(1e3 * bound, "SLO")],
            logarithmic_x=True,
        )
        for measure, series, bound in (
            ("TTFT", ttft, report.slo.ttft_s),
            ("TPOT", tpot, report.slo.tpot_s),
        )
    ]


def _by_bucket(
    records: Sequence[RequestRecord], bounds: Sequence[int]
) -> dict[str, list[RequestRecord]]:
    parts: dict[str, list[RequestRecord]] = {name: [] for name in bucket_names(bounds)}
    names = list(parts)
    for record in records:
        parts[names[bucket_of(record.input_tokens, bounds)]].append(record)
    return {name: part for name, part in parts.items() if part} if len(parts) > 1 else {}


def _timelines(run: LoadRun) -> list[str]:
    times = run.timeline.times_s
    blocks = {n: v for n, v in run.timeline.series.items() if n.startswith("baton_kv_blocks")}
    others = {n: v for n, v in run.timeline.series.items() if n not in blocks}
    return [
        draw_lines(
            {name: Line(times, values) for name, values in series.items() if any(values)},
            title=f"{title}, {run.title}",
            x="seconds",
            y=what,
        )
        for title, what, series in (
            ("Queues and batches", "sequences, requests", others),
            ("KV blocks", "blocks", blocks),
        )
        if any(any(values) for values in series.values())
    ]


def _goodput_plots(report: LoadReport) -> list[str]:
    runs = sorted(
        (run for run in report.runs if run.rate is not None), key=lambda run: run.rate or 0.0
    )
    rates = [run.rate or 0.0 for run in runs]
    goodput = [run.summary.goodput_per_s for run in runs]
    marks = [] if not report.goodput_rate else [Mark(report.goodput_rate, "highest rate that met")]
    by_bucket: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        for bucket in (run.summary.all, *run.summary.buckets):
            x, y = by_bucket.setdefault(bucket.name, ([], []))
            x.append(run.rate or 0.0)
            y.append(bucket.attainment)
    asked = [] if report.attainment is None else [Mark(report.attainment, "asked for", False)]
    return [
        draw_lines(
            {"goodput": Line(rates, goodput, marked=True), "offered": Line(rates, rates)},
            title="Goodput against rate",
            x="requests/s offered",
            y="good requests/s",
            marks=marks,
        ),
        draw_lines(
            {name: Line(x, y, marked=True) for name, (x, y) in by_bucket.items()},
            title="SLO attainment against rate, by input tokens",
            x="requests/s offered",
            y="share of requests",
            marks=asked,
        ),
    ]
