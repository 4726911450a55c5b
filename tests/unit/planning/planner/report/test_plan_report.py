"""A plan in words, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from planning.common.report import Machine
from planning.planner.cluster_kind import TRANSPORTS, ResourceBudget, WorkerKind
from planning.planner.evaluation import Evaluation
from planning.planner.planner import CapacityPlanner
from planning.planner.report.plan_page import page
from planning.planner.report.plan_report import COLUMNS, PlanReport, cells
from planning.planner.worker_kinds import Roles
from tests.support.loadtest.plans import SMALL, evaluation, trace

_MACHINE = Machine("cpu", 2, 1 << 30, "Linux", "abc", "2026-11-21")


@pytest.fixture(params=[8, 2], ids=["met", "missed"])
def report(request: pytest.FixtureRequest) -> PlanReport:
    made = report_of(evaluation(trace(40, 0.03, prompt=500)), SMALL, request.param)
    assert made.plan.is_met == (request.param == 8)
    return made


def report_of(tried: Evaluation, kind: WorkerKind, gpus: int) -> PlanReport:
    found = Roles((kind,), (kind,), ("a < b",), reachable=True)
    budget = ResourceBudget(gpus=gpus)
    plan = CapacityPlanner(tried, found, [TRANSPORTS["grpc"]], budget, 0.9).plan()
    return PlanReport(
        plan=plan,
        asked="trace; SLO.",
        prices={"small.json": 2.0},
        trials=tried.trials,
        simulations=tried.simulations,
        requests=tried.requests,
        wall_s=1.0,
        machine=_MACHINE,
        median_input=500.0,
    )


def test_words(report: PlanReport) -> None:
    text = "\n".join(report.lines())
    counts = report.plan.chosen.counts
    assert f"{counts.prefill} prefill + {counts.decode} decode workers of small + small" in text
    assert "twice the peak" in text
    assert ("p99 of the SLOs" in text) == report.plan.is_met
    assert f"{report.simulations} simulations" in text
    assert ("out of reach" in text) == (not report.plan.is_met)
    assert ("limits" in text) == (not report.plan.is_met)
    for one in report.plan.clusters:
        assert len(cells(one)) == len(COLUMNS)


def test_json(report: PlanReport) -> None:
    fields = json.loads(json.dumps(report.fields(), allow_nan=False))
    assert fields["met"] == report.plan.is_met
    if report.plan.is_met:
        best, own = fields["batch_size"]["best"], fields["batch_size"]["profile"]
        assert best["times_the_peak"] >= own["times_the_peak"] > 0
    assert fields["plan"]["prefill"]["count"] == report.plan.chosen.counts.prefill
    assert fields["plan"]["peak"]["attainment"] == report.plan.chosen.peak.attainment
    assert fields["plan"]["whole"]["requests"] == 40
    assert fields["others"][0]["whole"] is None
    assert len(fields["trials"]) == report.simulations
    assert {one["name"] for one in fields["others"]} >= {"colocated", "wisdom, 1:1"}


def test_a_plan_without_prefill_workers() -> None:
    cpu = replace(SMALL, profile=replace(SMALL.profile, is_cpu=True))
    report = report_of(evaluation(trace(10, 0.3, prompt=100, answer=20)), cpu, 2)
    assert report.plan.chosen.counts == (0, 1)
    assert "0 prefill + 1 decode workers of small" in "\n".join(report.lines())
    assert json.loads(json.dumps(report.fields(), allow_nan=False))["plan"]["prefill"]["count"] == 0
    assert page(report).count("<svg") == 3
    for one in report.plan.clusters:
        assert len(cells(one)) == len(COLUMNS)


def test_page(report: PlanReport) -> None:
    text = page(report)
    assert "a &lt; b" in text
    plots = text.split("<svg")[1:]
    assert len(plots) == 3
    for plot in plots:
        ElementTree.fromstring("<svg" + plot[: plot.index("</svg>") + 6])
    # Names of XML are no addresses: nothing is loaded.
    assert "src=" not in text
    assert 'href="http' not in text
    assert page(report) == text
