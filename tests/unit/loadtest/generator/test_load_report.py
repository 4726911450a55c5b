"""What is shown of runs: tables, JSON, records, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from baton.errors import ConfigError
from loadtest.generator.load_bench import Outputs
from loadtest.generator.load_page import page
from loadtest.generator.load_report import LoadReport, show, write_records, write_report
from loadtest.generator.load_run import LoadRun
from loadtest.generator.metrics_timeline import Timeline
from loadtest.generator.results.summary import Distribution, Window, summarize
from planning.common.report import this_machine
from tests.support.loadtest.load_report import SLO, make_run


def make_report(*runs: LoadRun, goodput: float | None = None) -> LoadReport:
    attainment = None if goodput is None else 0.9
    return LoadReport("m at <here>", SLO, this_machine(), runs, attainment, goodput)


def shown(report: LoadReport) -> str:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        show(console, report)
    return captured.get()


def test_tables() -> None:
    text = shown(make_report(make_run(2.0), make_run(1.0)))
    assert text.index("1 requests/s") < text.index("2 requests/s")
    for word in ("<= 512", "> 512", "TTFT", "TPOT", "ITL", "E2EL", "2 overloaded"):
        assert word in text
    assert "warning" not in text
    assert "Goodput:" not in text


def test_a_late_client_is_reported() -> None:
    assert "warning: 1 requests/s: the client read answers late: 50 ms" in shown(
        make_report(make_run(1.0, loop_lag_ms=50.0))
    )


def test_what_a_search_found() -> None:
    text = shown(make_report(make_run(2.0), make_run(1.0), goodput=1.0))
    assert "Goodput: 1 requests/s is the highest rate at which 90% meet TTFT <= 1 s" in text
    assert "No rate was found" in shown(make_report(make_run(2.0), goodput=0.0))


def test_json_and_records(tmp_path: Path) -> None:
    run = make_run(1.0)
    write_report(tmp_path / "r.json", make_report(run, goodput=1.0))
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["goodput_rate"] == 1.0
    assert found["slo"] == {"ttft_s": 1.0, "tpot_s": 0.15}
    (one,) = found["runs"]
    assert one["summary"]["all"]["ok"] == 8
    assert one["summary"]["all"]["ttft"]["p50_ms"] == run.summary.all.ttft.p50_ms
    assert one["timeline"]["series"]["baton_sequences decode running"] == [1.0, 2.0]
    write_records(tmp_path / "r.jsonl", [run, run])
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row["run"] for row in rows] == [0] * 10 + [1] * 10
    assert rows[3]["token_times_s"] == run.records[3].token_times_s.tolist()


def test_outputs_are_tried_before_anything_is_measured(tmp_path: Path) -> None:
    Outputs(tmp_path / "a.json").check()
    with pytest.raises(ConfigError):
        Outputs(html=tmp_path / "none" / "a.html").check()


def test_the_page_needs_nothing_else() -> None:
    text = page(make_report(make_run(2.0), make_run(1.0), goodput=1.0), (512,))
    assert "m at &lt;here&gt;" in text
    # Namespaces are names, and loaded from nowhere.
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(link.startswith("#") for link in links)
    assert "<script" not in text
    assert "@import" not in text
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    # Goodput and attainment against rate; of each run two distributions and two timelines.
    assert len(plots) == 2 + 2 * 4
    titles = " ".join("".join(ElementTree.fromstring(plot).itertext()) for plot in plots)
    for word in ("TTFT", "TPOT", "Queues and batches", "KV blocks", "Goodput against rate"):
        assert word in titles
    ids = re.findall(r'<clipPath id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_a_page_of_nothing() -> None:
    empty = LoadRun(
        rate=None,
        concurrency=2,
        summary=summarize([], Window(0.0, 1.0), SLO, ()),
        loop_lag=Distribution.of([]),
        client_core=0.0,
        timeline=Timeline((), {}),
        records=(),
    )
    assert "2 at a time" in page(make_report(empty), ())
    assert empty.warnings == ("no request was due between warm-up and cool-down",)
