"""`baton plan`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.command_line import INTERRUPTED, complain, counts_in, fail, names_in, say
from deploy.config_loading import load
from deploy.option_group import takes
from deploy.trace_options import TraceOptions


@takes(TraceOptions)
def plan(
    options: TraceOptions,
    trace: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Mooncake's JSONL or Azure's CSV, plain or gzipped. Of several each is served by"
            " itself, and the plan is for all of them.",
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE,…",
            help="What workers may be made of: a100, h100, h200, b200, l40s, or a file of `baton"
            " calibrate`.",
        ),
    ],
    slo: Annotated[
        str,
        typer.Option(
            help="In seconds, or with a unit: ttft=2,tpot=100ms. Default: the configuration's."
        ),
    ] = "",
    budget: Annotated[int | None, typer.Option(min=2, help="GPUs that there are at most.")] = None,
    budget_per_hour: Annotated[
        float | None, typer.Option(min=0.01, help="Dollars an hour that there are at most.")
    ] = None,
    target: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of requests that must meet every SLO.")
    ] = 0.9,
    tp: Annotated[
        str,
        typer.Option(
            metavar="N,…",
            help="GPUs of a worker that are tried. Default: the smallest two that will do.",
        ),
    ] = "",
    transport: Annotated[
        str, typer.Option(metavar="NAME,…", help="grpc, nixl, nccl, cuda_ipc.")
    ] = "grpc,nixl,cuda_ipc",
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DOLLARS", help="Of a GPU and hour. Default: what docs/planner.md assumes."
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            min=0,
            help="Of the trace's busiest part: there is searched; what is found serves all of it"
            " too. 0: search in all of it.",
        ),
    ] = 10.0,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots there.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the plan there: as TOML for `baton up --config` and Compose, or, where FILE"
            " ends in .yaml, as values of the Helm chart.",
        ),
    ] = None,
) -> None:
    """Find the cheapest cluster that meets SLOs on a trace, by simulation.

    Exit code 1 where the budget is too small; then the best that it allows is shown.
    """
    from baton.errors import BatonError  # noqa: PLC0415
    from loadtest.planner.cluster_kind import Budget  # noqa: PLC0415
    from loadtest.planner.command import PlanOutputs, PlanSettings, plan_command  # noqa: PLC0415

    if budget is None and budget_per_hour is None:
        fail("give --budget in GPUs, --budget-per-hour in dollars, or both")
    settings = PlanSettings(
        traces=tuple(trace),
        slo=slo,
        gpus=names_in(gpu),
        budget=Budget(
            math.inf if budget is None else budget,
            math.inf if budget_per_hour is None else budget_per_hour,
        ),
        target=target,
        model_config=options.model_config,
        degrees=counts_in(tp) if tp else (),
        transports=names_in(transport),
        prices=tuple(price or ()),
        minutes=minutes,
        scale_time=options.scale_time,
        scale_length=options.scale_length,
        block_tokens=options.block_tokens,
        seed=options.seed,
    )
    outputs = PlanOutputs(options.json, html, write)
    try:
        config = load(options.config)
        is_met = plan_command(settings, config, outputs, say, Console())
    except (BatonError, OSError, ValueError) as error:
        complain(str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if not is_met:
        raise typer.Exit(1)
