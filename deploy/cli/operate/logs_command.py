"""`baton logs`: the logs of the runs of this user on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options.command_line import fail
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.output import print_table

if TYPE_CHECKING:
    from pathlib import Path

    from deploy.processes.run_history import Run

_LINES = 20


def run_names(incomplete: str) -> list[str]:
    """List the names of the runs on this machine, for shell completion."""
    from deploy.processes.run_history import runs  # noqa: PLC0415

    return [run.name for run in runs() if run.name.startswith(incomplete)]


def logs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Name of a run, or the id of its cluster. Default: the live run, or the last one.",
            autocompletion=run_names,
        ),
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Show one process only, such as router, decode-0 or supervisor."
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="Last lines of each log to show.")
    ] = _LINES,
    list_runs: Annotated[
        bool, typer.Option("--list", help="List the runs whose logs are on this machine.")
    ] = False,
) -> None:
    """Show the logs of a run that is live or has ended.

    The logs of the last five runs are kept after they end, also after a crash.

        baton logs
        baton logs --list
        baton logs baton-audw0ut2 --process decode-0 --lines 200
    """
    from deploy.processes.run_history import runs  # noqa: PLC0415

    found = runs()
    if list_runs:
        _show_runs(found)
        return
    chosen = [one for one in found if run in (None, one.name, one.about.cluster_id)]
    if not chosen:
        about = "there is no run" if run is None else f"there is no run {run!r}"
        fail(f"{about} of yours on this machine: `baton logs --list` shows them")
    _show_logs(chosen[0], process, lines)


def _show_runs(found: list[Run]) -> None:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("run", "state", "started", "cluster", "model", "logs", box=None, pad_edge=False)
    for run in found:
        at = run.about.started_at
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "unknown"
        state = "live" if run.is_live else "ended"
        about = run.about
        row = run.name, state, started, about.cluster_id, about.model, str(run.directory.logs)
        table.add_row(*map(Text, row))
    print_table(table)


def _show_logs(run: Run, process: str | None, lines: int) -> None:
    from deploy.processes.child import last_lines  # noqa: PLC0415

    files = sorted(run.directory.logs.glob("*.log"))
    if process is not None:
        files = [file for file in files if file.stem == process]
    shown = 0
    for file in files:
        text = last_lines(file, lines)
        if text or process is not None:
            typer.echo(f"{_gap(shown)}==> {file} <==\n{text}")
            shown += 1
    if process is not None and not shown:
        names = ", ".join(file.stem for file in sorted(run.directory.logs.glob("*.log")))
        fail(f"{run.name} has no log of {process!r}; it has: {names}", code=ExitCode.USAGE)
    _tell_of_ray(run.directory.logs / "ray")


def _gap(shown: int) -> str:
    return "\n" if shown else ""


def _tell_of_ray(folder: Path) -> None:
    if folder.is_dir():
        typer.echo(f"\nRay's own logs are in {folder}", err=True)
