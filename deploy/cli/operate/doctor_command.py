"""`baton doctor`: checks this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options.choices import OutputFormat
from deploy.cli.options.command_line import clear_errors, fail
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.output import Output, print_json, print_table


def doctor(
    nccl: Annotated[
        bool,
        typer.Option(
            "--nccl", help="Test NCCL between two GPUs of this machine, and measure its GB/s."
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also check the ports, Redis, Ray and model of this TOML configuration.",
        ),
    ] = None,
    output: Output = "table",
) -> None:
    """Check this machine, and show what to fix.

    Exit code 4: something that Baton needs is missing. Exit code 7: --nccl needs two GPUs.
    """
    from deploy.cli.options.config_loading import load  # noqa: PLC0415
    from deploy.doctor import doctor as examination  # noqa: PLC0415
    from deploy.doctor.doctor_host import host_checks  # noqa: PLC0415

    if nccl:
        _check_nccl(output)
        return
    checks = [*examination.CHECKS, *host_checks(load(config))]
    findings = examination.examine(checks)
    if output == "json":
        print_json(examination.document(findings))
    else:
        print_table(examination.draw(findings))
    raise typer.Exit(ExitCode.OK if examination.is_fit(findings) else ExitCode.UNHEALTHY)


def _check_nccl(output: OutputFormat) -> None:
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.doctor.doctor import draw_steps, nccl_devices  # noqa: PLC0415
    from deploy.doctor.pair_check import check_pair  # noqa: PLC0415

    try:
        devices = nccl_devices()
    except BatonError as error:
        fail(error.message, code=ExitCode.UNSUPPORTED)
    with clear_errors():
        steps = check_pair("nccl", devices)
    if output == "json":
        print_json({"steps": [asdict(step) | {"gb_per_s": step.gb_per_s} for step in steps]})
    else:
        print_table(draw_steps(steps))
