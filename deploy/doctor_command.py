"""`baton doctor`: what can run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.command_line import clear_errors, complain

_COULD_NOT_RUN = 2


def doctor(
    nccl: Annotated[
        bool,
        typer.Option("--nccl", help="Move blocks between two GPUs over NCCL, and abort; GB/s."),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TOML, as for `baton up`: its ports, Redis, Ray and model."
        ),
    ] = None,
) -> None:
    """Show what of Baton can run on this machine, and what to do where something is wrong.

    Exit code 1 when something is missing that is needed. With --nccl the exit code is 2 where there
    are fewer than two GPUs.
    """
    from deploy import doctor as examination  # noqa: PLC0415
    from deploy.config_loading import load  # noqa: PLC0415
    from deploy.doctor_host import host_checks  # noqa: PLC0415

    if nccl:
        _check_nccl()
        return
    checks = [*examination.CHECKS, *host_checks(load(config))]
    findings = examination.examine(checks)
    Console().print(examination.draw(findings), markup=False, highlight=False)
    raise typer.Exit(0 if examination.is_fit(findings) else 1)


def _check_nccl() -> None:
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.doctor import draw_steps, nccl_devices  # noqa: PLC0415
    from deploy.pair_check import check_pair  # noqa: PLC0415

    try:
        devices = nccl_devices()
    except BatonError as error:
        complain(error.message)
        raise typer.Exit(_COULD_NOT_RUN) from None
    with clear_errors():
        Console().print(draw_steps(check_pair("nccl", devices)))
