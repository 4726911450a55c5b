"""`baton simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.measure.trace_options import TraceOptions
from deploy.cli.options.command_line import INTERRUPTED, fail, say
from deploy.cli.options.config_loading import load
from deploy.cli.options.option_group import takes


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
    )
    try:
        simulate_command(settings, load(options.config), say, Console(), options.json)
    except (BatonError, OSError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
