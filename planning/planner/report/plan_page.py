"""Shows a plan as one self-contained HTML page: the table, and plots as SVG."""

from __future__ import annotations

from pathlib import Path

import jinja2

from planning.common.plots import Line, Mark, draw_lines
from planning.common.report import write_json
from planning.planner.evaluation import Trial
from planning.planner.plan import PlannedCluster
from planning.planner.report.plan_report import COLUMNS, PlanReport, cells

_TEMPLATE = "plan_page.html"


def write_page(path: Path, report: PlanReport) -> None:
    """Write a plan's HTML page. Raises ConfigError if that fails."""
    write_json(path, page(report))


def page(report: PlanReport) -> str:
    """Return the whole HTML page of a plan."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("planning.planner.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        columns=COLUMNS,
        rows=[cells(one) for one in report.plan.clusters],
        lines=list(report.lines()),
        plots=[_frontier(report), _searched(report), _yield(report)],
    )


def _frontier(report: PlanReport) -> str:
    """Plot price and attainment of each cluster. No other cluster beats the clusters on the drawn
    line in both."""
    plan = report.plan
    best = plan.frontier()
    lines = {
        "frontier": Line(
            [one.price_per_hour for one in best], [one.peak.attainment for one in best]
        )
    }
    for one in plan.clusters:
        lines.setdefault(
            _label(one), Line([one.price_per_hour], [one.peak.attainment], marked=True)
        )
    return draw_lines(
        lines,
        title="SLO attainment against price",
        x="$/h",
        y="share of requests at the peak",
        marks=[Mark(plan.target, "target", vertical=False)],
    )


def _searched(report: PlanReport) -> str:
    """Plot the worker counts that were simulated at the traffic's peak, for the plan's kind of
    workers."""
    chosen = report.plan.chosen.kind
    tried = [
        one
        for one in report.trials
        if (one.kind.prefill.name, one.kind.decode.name)
        == (chosen.prefill.name, chosen.decode.name)
        and one.extent in ("peak", "whole")
        and one.counts.prefill
    ]
    return draw_lines(
        {
            name: Line(
                [one.counts.prefill for one in some],
                [one.counts.decode for one in some],
                marked=True,
                joined=False,
            )
            for name, some in _sides(tried, report.plan.target).items()
            if some
        },
        title="Counts that were tried",
        x="prefill workers",
        y="decode workers",
    )


def _sides(trials: list[Trial], target: float) -> dict[str, list[Trial]]:
    missed = {
        (one.counts, one.kind)
        for one in trials
        if one.figures is not None and one.figures.attainment < target
    }
    return {
        "missed the target": [one for one in trials if (one.counts, one.kind) in missed],
        "met it": [one for one in trials if (one.counts, one.kind) not in missed],
    }


def _yield(report: PlanReport) -> str:
    """Plot goodput per GPU against the share of GPUs that compute prompts."""
    kind = report.plan.chosen.kind
    alike = sorted(
        (
            one
            for one in report.plan.clusters
            if one.kind == kind and one.gpus == report.plan.chosen.gpus and one.counts.prefill
        ),
        key=_prefill_share,
    )
    return draw_lines(
        {
            "same number of GPUs as the plan": Line(
                [_prefill_share(one) for one in alike],
                [one.goodput_per_gpu for one in alike],
                marked=True,
            )
        },
        title="Goodput against the ratio, for the plan and rules of thumb",
        x="share of GPUs that compute prompts",
        y="good requests/s and GPU",
    )


def _prefill_share(cluster: PlannedCluster) -> float:
    return cluster.counts.prefill * cluster.kind.prefill.gpus / cluster.gpus


def _label(cluster: PlannedCluster) -> str:
    return f"{cluster.name} ({cluster.counts.prefill}+{cluster.counts.decode})"
