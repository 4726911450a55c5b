"""`baton plan`: finds a cluster for traces, SLOs and a budget."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape

from baton.config.cluster import Config
from baton.errors import ConfigError
from planning.common.plots import check_plots
from planning.common.report import this_machine, write_json
from planning.common.slo import Slo
from planning.common.traces import read_trace
from planning.planner.alternatives import median_input
from planning.planner.cluster_kind import DEFAULT_TRANSPORTS, ResourceBudget
from planning.planner.evaluation import Evaluation, Trial
from planning.planner.planner import CapacityPlanner
from planning.planner.report.plan_config import plan_file
from planning.planner.report.plan_page import write_page
from planning.planner.report.plan_report import PlanReport, show
from planning.planner.worker_kinds import parse_prices, price_of, roles, transports, worker_kinds

Say = Callable[[str], None]
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Inputs of a plan."""

    traces: tuple[Path, ...]
    """Files of recorded traffic. The plan must meet the target on each of them separately."""
    slo: str
    """SLOs as text, in the format of ``planning.common.slo``. An SLO that is missing in the text
    comes from the configuration."""
    gpus: tuple[str, ...]
    """Names of accelerators, or profile files that `baton calibrate` wrote."""
    budget: ResourceBudget
    target: float = 0.9
    """Share of requests that must meet every SLO."""
    model_config: str = ""
    degrees: tuple[int, ...] = ()
    """Degrees of tensor parallelism to try. If empty, the smallest two that fit are tried."""
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    prices: tuple[str, ...] = ()
    """GPU prices as text, in the format of ``planning.planner.worker_kinds.parse_prices``."""
    minutes: float = 10.0
    """Length in minutes of each trace's busiest part. The search runs on that part; 0 means the
    whole trace."""
    scale_time: float = 1.0
    scale_length: float = 1.0
    block_tokens: int = 0
    seed: int = 0

    def bounds(self) -> Slo:
        """Return the bounds of the requested SLOs. Raises ConfigError."""
        return Slo.parse(self.slo) if self.slo else Slo()


@dataclass(frozen=True, slots=True)
class PlanOutputs:
    """Files to which the plan is written. None means that a file is not written."""

    json: Path | None = None
    html: Path | None = None
    config: Path | None = None
    """TOML file for `baton serve`. It is written only if the target is met."""


def simulated_config(config: Config, slo: Slo) -> Config:
    """Return ``config`` with the requested SLOs, for the simulation. Raises ConfigError.

    Unless ``config`` sets ``local_prefill``, it is turned off. Prefill workers then compute all
    prompts, so that the plan has enough of them.
    """
    bounds = slo.bounds()
    if "e2el_s" in bounds:
        raise ConfigError("a plan needs a TTFT and a TPOT: give these in --slo, and no e2el")
    owner = next((one.name for one in config.classes if one.pools), None)
    if owner is not None:
        raise ConfigError(f"a plan has one pool per role, but the class {owner} has its own")
    changed: dict[str, Any] = {f"slo_{name}": bound for name, bound in bounds.items()}
    if "local_prefill" not in config.model_fields_set:
        changed["local_prefill"] = "never"
    return config.model_copy(update=changed)


def make_report(settings: PlanSettings, config: Config, progress: PlanProgress) -> PlanReport:
    """Search for a plan, and return it with all figures for its report. Raises ConfigError."""
    if not 0 < settings.target <= 1:
        raise ConfigError(
            f"the target must be a share of requests above 0, not {settings.target:g}"
        )
    needs_prefill = config.needs_prefill
    config = simulated_config(config, settings.bounds())
    began = time.perf_counter()
    traces = [
        read_trace(path, settings.scale_time, settings.scale_length) for path in settings.traces
    ]
    evaluation = Evaluation(
        traces,
        config,
        peak_s=settings.minutes * _MINUTE_S,
        block_tokens=settings.block_tokens,
        seed=settings.seed,
        listen=progress.hear,
    )
    prices = parse_prices(settings.prices)
    kinds, dropped = worker_kinds(settings.gpus, settings.model_config, settings.degrees, prices)
    found = roles(
        kinds, evaluation.traffic["peak"], config, settings.target, every=bool(settings.degrees)
    )
    planner = CapacityPlanner(
        evaluation,
        found,
        transports(settings.transports),
        settings.budget,
        settings.target,
        needs_prefill=needs_prefill,
    )
    plan = planner.plan()
    return PlanReport(
        plan=plan,
        asked=asked(settings, config),
        prices={gpu: price_of(prices, gpu) for gpu in settings.gpus},
        trials=evaluation.trials,
        simulations=evaluation.simulations,
        requests=evaluation.requests,
        wall_s=time.perf_counter() - began,
        machine=this_machine(),
        median_input=median_input(evaluation.traffic["whole"]),
        settings={**_plain(asdict(settings)), "dropped": dropped},
    )


def asked(settings: PlanSettings, config: Config) -> str:
    """Describe in words what was requested: traces, SLOs and budget."""
    slo = Slo(config.slo_ttft_s, config.slo_tpot_s).text()
    names = ", ".join(path.name for path in settings.traces)
    scales = "".join(
        f", {what} divided by {scale:g}"
        for what, scale in (("times", settings.scale_time), ("lengths", settings.scale_length))
        if scale != 1.0
    )
    return f"{names}{scales}; SLO {slo}; budget {settings.budget.text()}."


def plan_command(
    settings: PlanSettings, config: Config, outputs: PlanOutputs, say: Say, console: Console
) -> bool:
    """Search for a plan, print it, and write its files. Return whether the target is met. Raises
    ConfigError.
    """
    if outputs.html is not None:
        check_plots()  # a plan may take minutes
    with PlanProgress(Console(stderr=True), say) as progress:
        report = make_report(settings, config, progress)
    show(console, report)
    if outputs.json is not None:
        write_json(outputs.json, json.dumps(report.fields(), indent=1) + "\n")
    if outputs.html is not None:
        write_page(outputs.html, report)
    if outputs.config is not None and report.plan.is_met:
        served = simulated_config(config, settings.bounds())
        text = plan_file(outputs.config, report.plan, served, report.asked)
        write_json(outputs.config, text)
    return report.plan.is_met


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields`` with replacements for values that JSON does not support."""
    budget = {name: bound for name, bound in fields["budget"].items() if bound < float("inf")}
    traces = [str(path) for path in fields["traces"]]
    return fields | {"budget": budget, "traces": traces}


class PlanProgress:
    """Shows the progress of the search with a spinner. Owned by the command."""

    def __init__(self, console: Console, say: Callable[[str], None]) -> None:
        """Show a spinner if ``console`` is a terminal; otherwise call ``say`` with a line for each
        simulation.
        """
        self._say = say
        self._status = console.status("reading") if console.is_terminal else None
        self._best = ""

    def __enter__(self) -> PlanProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def hear(self, trial: Trial) -> None:
        """Show that a simulation has begun or ended. If it has begun, ``trial`` has no figures
        yet."""
        if self._status is not None:
            if trial.figures is not None:
                self._best = trial.text()
            before = f" (before: {self._best})" if self._best and trial.figures is None else ""
            self._status.update(escape(f"simulation {trial.text()}{before}"))
        elif trial.figures is not None:
            self._say(trial.text())
