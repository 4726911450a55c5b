"""`baton plan` and `baton simulate`: commands over a trace of requests and a simulated cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.options.command_line import INTERRUPTED, counts_in, fail, names_in, say
from deploy.cli.options.config_loading import load
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.option_group import takes


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options on how to read a trace of requests, and on the model that serves it."""

    model_config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Model to simulate on GPUs: a name or a config.json. Default: Llama 3.1 8B.",
        ),
    ] = ""
    scale_time: Annotated[
        float, typer.Option(help="Divide the trace's times by this: 2 doubles the request rate.")
    ] = 1.0
    scale_length: Annotated[float, typer.Option(help="Divide the trace's lengths by this.")] = 1.0
    block_tokens: Annotated[
        int,
        typer.Option(
            min=0, show_default=False, help="Tokens per KV block. Default: the trace's, else 64."
        ),
    ] = 0
    seed: Annotated[int, typer.Option(help="Random seed, for policies that choose at random.")] = 0
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML configuration of the cluster: policy, SLOs, classes, admission, local"
            " prefill.",
        ),
    ] = None
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results to FILE as JSON."),
    ] = None


@takes(TraceOptions)
def plan(
    options: TraceOptions,
    trace: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Trace: Mooncake's JSON lines or Azure's CSV, plain or gzipped. Repeatable: the"
            " plan must serve each trace by itself.",
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE,…",
            help="GPU types to choose from: a100, h100, h200, b200, l40s, or a file that `baton"
            " calibrate` wrote.",
        ),
    ],
    slo: Annotated[
        str,
        typer.Option(
            help="Latency targets, in seconds or with a unit: ttft=2,tpot=100ms. Default: those of"
            " --config."
        ),
    ] = "",
    budget: Annotated[int | None, typer.Option(min=2, help="Maximum number of GPUs.")] = None,
    budget_per_hour: Annotated[
        float | None, typer.Option(min=0.01, help="Maximum cost, in dollars per hour.")
    ] = None,
    target: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of requests that must meet all SLOs.")
    ] = 0.9,
    tp: Annotated[
        str,
        typer.Option(
            metavar="N,…",
            help="Tensor-parallel sizes to try. Default: the two smallest that fit the model.",
        ),
    ] = "",
    transport: Annotated[
        str,
        typer.Option(
            metavar="NAME,…", help="KV transports to try, out of grpc, nixl, nccl, cuda_ipc."
        ),
    ] = "grpc,nixl,cuda_ipc",
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DOLLARS",
            help="Price of a GPU per hour; repeatable. docs/explanation/planner.md has the"
            " defaults.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            min=0,
            help="Search on the trace's busiest part of this length, then check the result on all"
            " of it. 0 searches on the whole trace.",
        ),
    ] = 10.0,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML report with plots to FILE.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the plan to FILE: as TOML configuration, or as values of the Helm chart if"
            " FILE ends in .yaml.",
        ),
    ] = None,
) -> None:
    """Find the cheapest cluster that meets SLOs on a trace.

    It simulates clusters. Give --budget, --budget-per-hour, or both. Exit code 6: no cluster within
    the budget meets the SLOs; the best one is shown.

        baton plan --trace trace.jsonl --gpu h100,l40s --budget 16
    """
    from baton.errors import BatonError  # noqa: PLC0415
    from planning.plan_command import PlanOutputs, PlanSettings, plan_command  # noqa: PLC0415
    from planning.planner.cluster_kind import ResourceBudget  # noqa: PLC0415

    if budget is None and budget_per_hour is None:
        fail("give --budget in GPUs, --budget-per-hour in dollars, or both", code=ExitCode.USAGE)
    settings = PlanSettings(
        traces=tuple(trace),
        slo=slo,
        gpus=names_in(gpu),
        budget=ResourceBudget(
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
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if not is_met:
        raise typer.Exit(ExitCode.OVER_BUDGET)


@takes(TraceOptions)
def simulate(
    options: TraceOptions,
    trace: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Trace to replay: Mooncake's JSON lines or Azure's CSV, plain or gzipped.",
        ),
    ],
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Hardware profile of workers: a100, h100, h200, b200, l40s, or a file that `baton"
            " calibrate` wrote.",
        ),
    ],
    prefill: Annotated[
        int,
        typer.Option(
            min=0, help="Prefill workers; 0 means that decode workers also compute prompts."
        ),
    ] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    prefill_profile: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Hardware profile for prefill workers. Default: --profile.",
        ),
    ] = "",
    decode_profile: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Hardware profile for decode workers. Default: --profile.",
        ),
    ] = "",
    tp: Annotated[
        int, typer.Option(min=1, max=64, help="Tensor parallelism: GPUs per worker.")
    ] = 1,
    hosts: Annotated[
        int,
        typer.Option(
            min=0,
            show_default=False,
            help="Machines that share their cores and memory among workers, as `baton calibrate`"
            " timed it. Default: one per worker.",
        ),
    ] = 0,
    routers: Annotated[
        int, typer.Option(min=1, help="Routers. They get the requests in turn.")
    ] = 1,
) -> None:
    """Simulate a cluster on a request trace.

    The simulation runs Baton's own routing policy and schedulers, without a model.

        baton simulate --trace trace.jsonl --profile h100 --prefill 2 --decode 4
    """
    from baton.errors import BatonError  # noqa: PLC0415
    from planning.simulate_command import SimulateSettings, simulate_command  # noqa: PLC0415

    settings = SimulateSettings(
        trace,
        prefill,
        decode,
        profile,
        prefill_profile,
        decode_profile,
        options.model_config,
        tp,
        options.scale_time,
        options.scale_length,
        hosts,
        options.seed,
        options.block_tokens,
        routers,
    )
    try:
        simulate_command(settings, load(options.config), say, Console(), options.json)
    except (BatonError, OSError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
