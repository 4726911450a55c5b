"""`baton simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.command_line import say
from deploy.config_loading import load
from deploy.option_group import takes
from deploy.trace_options import TraceOptions


@takes(TraceOptions)
def simulate(
    options: TraceOptions,
    trace: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Mooncake's JSONL or Azure's CSV, plain or gzipped."),
    ],
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What a worker is: a100, h100, h200, b200, l40s, or a file of `baton calibrate`.",
        ),
    ],
    prefill: Annotated[
        int,
        typer.Option(min=0, help="Prefill workers; 0: every worker does both.", show_default=True),
    ] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.", show_default=True)] = 1,
    prefill_profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Of prefill workers, if they are others.")
    ] = "",
    decode_profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Of decode workers, if they are others.")
    ] = "",
    tp: Annotated[int, typer.Option(min=1, max=64, help="GPUs of a worker.")] = 1,
    hosts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Machines whose cores and memory the workers share, as a profile of `baton"
            " calibrate` has timed it. Default: one for each worker.",
        ),
    ] = 0,
) -> None:
    """Serve a trace with a simulated cluster: Baton's own policy and schedulers, no engine."""
    from baton.errors import BatonError  # noqa: PLC0415
    from loadtest.simulator.command import SimulateSettings, simulate_command  # noqa: PLC0415

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
    )
    try:
        simulate_command(settings, load(options.config), say, Console(), options.json)
    except (BatonError, OSError, ValueError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
