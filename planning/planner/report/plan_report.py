"""Shows a plan as text, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from planning.common.report import Machine, print_whole, whole_table
from planning.planner.evaluation import Trial
from planning.planner.plan import Figures, Plan, PlannedCluster, SizeSearch, SizeTrial

COLUMNS = (
    *("cluster", "prefill", "decode", "TP", "transport", "GPUs", "$/h", "$/1M in", "$/1M out"),
    *("$/1M", "goodput/s", "per GPU", "MFU prefill", "MBU decode", "TTFT p95, s", "TPOT p95, ms"),
    *("met", "over all"),
)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All results of one run of `baton plan`."""

    plan: Plan
    asked: str
    """Description of the request: traces, SLOs, budget."""
    prices: Mapping[str, float]
    """Prices of the requested GPUs, in dollars per GPU and hour."""
    trials: Sequence[Trial]
    simulations: int
    requests: int
    """Number of simulated requests in total."""
    wall_s: float
    machine: Machine
    median_input: float
    """Length of the median prompt, in tokens."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the lines of text that follow the table."""
        plan, chosen = self.plan, self.plan.chosen
        counted = f"{chosen.counts.prefill} prefill + {chosen.counts.decode} decode workers"
        bought = (
            f"{counted} of {chosen.kind.name}: {chosen.gpus} GPUs, ${chosen.price_per_hour:.2f}/h"
        )
        if plan.is_met:
            yield f"Plan: {bought}; {plan.target:.0%} meet every SLO."
        else:
            yield f"The target of {plan.target:.0%} is out of reach. Best: {bought}."
            yield f"What limits it: {plan.limits}."
        if chosen.whole is not None and chosen.whole != chosen.peak:
            yield (
                f"Over the whole trace: {chosen.whole.attainment:.1%} meet every SLO, goodput "
                f"{chosen.whole.goodput_per_s:.2f}/s, "
                f"${_dollars(chosen.price_of_all(chosen.whole))} per million tokens. The table is "
                "of its busiest part."
            )
        yield f"At twice the peak's rate: {_rushed(plan.twice, chosen.peak)}."
        if plan.sizes is not None:
            yield from _size_lines(plan.sizes)
        prices = ", ".join(f"{gpu} ${price:g}" for gpu, price in self.prices.items())
        yield f"Assumed prices per GPU and hour: {prices}."
        yield from (f"Not taken: {remark}." for remark in plan.remarks)
        yield (
            f"{self.asked} {self.simulations} simulations of {self.requests:,} requests in all took"
            f" {self.wall_s:.0f} s. {self.machine.line()}."
        )

    def fields(self) -> dict[str, Any]:
        """Return the report's fields for JSON."""
        return {
            "settings": dict(self.settings),
            "asked": self.asked,
            "prices": dict(self.prices),
            "machine": asdict(self.machine),
            "target": self.plan.target,
            "met": self.plan.is_met,
            "limits": self.plan.limits,
            "plan": cluster_fields(self.plan.chosen),
            "others": [cluster_fields(one) for one in self.plan.others],
            "frontier": [one.name for one in self.plan.frontier()],
            "batch_size": None if self.plan.sizes is None else size_fields(self.plan.sizes),
            "twice_the_peak": _figure_fields(self.plan.twice),
            "remarks": list(self.plan.remarks),
            "median_input_tokens": self.median_input,
            "simulations": self.simulations,
            "simulated_requests": self.requests,
            "trials": [trial_fields(one) for one in self.trials],
            "wall_s": self.wall_s,
        }


def cluster_fields(cluster: PlannedCluster) -> dict[str, Any]:
    """Return the JSON fields of one cluster in the plan's table."""
    kind = cluster.kind
    return {
        "name": cluster.name,
        "prefill": {
            "count": cluster.counts.prefill,
            "gpu": kind.prefill.gpu,
            "tp": kind.prefill.gpus,
        },
        "decode": {
            "count": cluster.counts.decode,
            "gpu": kind.decode.gpu,
            "tp": kind.decode.gpus,
        },
        "transport": kind.transport.name,
        "gpus": cluster.gpus,
        "dollars_per_hour": cluster.price_per_hour,
        "dollars_per_million_input_tokens": cluster.input_price,
        "dollars_per_million_output_tokens": cluster.output_price,
        "dollars_per_million_tokens": cluster.token_price,
        "goodput_per_gpu_s": cluster.goodput_per_gpu,
        "peak": _figure_fields(cluster.peak),
        "whole": None if cluster.whole is None else _figure_fields(cluster.whole),
    }


def size_fields(sizes: SizeSearch) -> dict[str, Any]:
    """Return the JSON fields of the search for the batch size."""
    return {
        "pairs": sizes.tried,
        **{
            name: {
                "max_sequences": one.size.max_sequences,
                "chunk_tokens": one.size.chunk_tokens,
                "times_the_peak": one.rate,
                "figures": None if one.figures is None else _figure_fields(one.figures),
            }
            for name, one in (("best", sizes.best), ("profile", sizes.own))
        },
    }


def trial_fields(trial: Trial) -> dict[str, Any]:
    """Return the JSON fields of one simulation of the search."""
    return {
        "kind": trial.kind.name,
        "prefill": trial.counts.prefill,
        "decode": trial.counts.decode,
        "extent": trial.extent,
        "slo_attainment": None if trial.figures is None else trial.figures.attainment,
    }


def _figure_fields(figures: Figures) -> dict[str, Any]:
    rates = {"offered_per_s": figures.offered_per_s, "goodput_per_s": figures.goodput_per_s}
    return asdict(figures) | rates


def _size_lines(sizes: SizeSearch) -> Iterator[str]:
    best, own = sizes.best, sizes.own
    if best.figures is None:
        yield f"Batch: none of {sizes.tried} pairs meets the p99 of the SLOs at any tried rate."
        return
    yield (
        f"Batch: {_sized(best)} {best.rate:.2f} times the peak's rate within the p99 of the SLOs, "
        f"{best.figures.goodput_per_s:.2f} requests/s; the highest of {sizes.tried} pairs."
    )
    if own is not best:
        much = f"serve {own.rate:.2f} times" if own.figures else "do not meet the p99"
        yield f"The profile's, {own.size.max_sequences} and {own.size.chunk_tokens}, {much}."


def _sized(trial: SizeTrial) -> str:
    size = trial.size
    return f"max_sequences {size.max_sequences} and chunk_tokens {size.chunk_tokens} serve"


def _rushed(twice: Figures, peak: Figures) -> str:
    return (
        f"of {twice.offered_per_s:.2f} requests/s {twice.attainment:.1%} meet every SLO,"
        f" {twice.shed / twice.requests:.1%} are shed and {twice.failed / twice.requests:.1%} fail;"
        f" goodput {twice.goodput_per_s:.2f}/s, compared with {peak.goodput_per_s:.2f}/s of"
        f" {peak.offered_per_s:.2f}; TTFT p95 {_seconds(twice.ttft_p95_s)} s"
    )


def cells(cluster: PlannedCluster) -> list[str]:
    """Return the table cells of one cluster, in the order of ``COLUMNS``."""
    kind, peak = cluster.kind, cluster.peak
    degrees = [str(kind.decode.gpus)]
    if cluster.counts.prefill and kind.prefill.gpus != kind.decode.gpus:
        degrees.insert(0, str(kind.prefill.gpus))
    return [
        cluster.name,
        str(cluster.counts.prefill),
        str(cluster.counts.decode),
        "+".join(degrees),
        kind.transport.name,
        str(cluster.gpus),
        f"{cluster.price_per_hour:.2f}",
        *map(_dollars, (cluster.input_price, cluster.output_price, cluster.token_price)),
        f"{peak.goodput_per_s:.2f}",
        f"{cluster.goodput_per_gpu:.3f}",
        *map(_share, (peak.prefill_mfu, peak.decode_mbu)),
        _seconds(peak.ttft_p95_s),
        "-" if peak.tpot_p95_s is None else f"{peak.tpot_p95_s * 1e3:.1f}",
        *map(_share, (peak.attainment, cluster.whole.attainment if cluster.whole else None)),
    ]


def table(plan: Plan) -> Table:
    """Return the table of the plan and its alternatives."""
    drawn = whole_table(*COLUMNS, title="")
    for one in plan.clusters:
        drawn.add_row(*cells(one))
    return drawn


def show(console: Console, report: PlanReport) -> None:
    """Print the table, and the lines below it."""
    print_whole(console, table(report.plan))
    for line in report.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
