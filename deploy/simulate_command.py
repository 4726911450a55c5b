"""`baton simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def simulate(
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
    model_config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A config.json, for accelerators. Default: Llama 3.1 8B."
        ),
    ] = "",
    tp: Annotated[int, typer.Option(min=1, max=64, help="GPUs of a worker.")] = 1,
    scale_time: Annotated[
        float, typer.Option(help="Divides the trace's times: 2 is twice the rate.")
    ] = 1.0,
    scale_length: Annotated[float, typer.Option(help="Divides the trace's lengths.")] = 1.0,
    block_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a KV block. Default: the trace's, or 64.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="For policies that draw.")] = 0,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML, as for `baton up`: policy, SLOs, classes, admission, local prefill.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
) -> None:
    """Serve a trace with a simulated cluster: Baton's own policy and schedulers, no engine."""
    from baton.config import load_config  # noqa: PLC0415
    from baton.errors import BatonError  # noqa: PLC0415
    from loadtest.simulator.command import SimulateSettings, simulate_command  # noqa: PLC0415

    settings = SimulateSettings(
        trace,
        prefill,
        decode,
        profile,
        prefill_profile,
        decode_profile,
        model_config,
        tp,
        scale_time,
        scale_length,
        seed,
        block_tokens,
    )

    def say(text: str) -> None:
        typer.echo(text, err=True)

    try:
        simulate_command(settings, load_config(config), say, Console(), output)
    except (BatonError, OSError, ValueError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
