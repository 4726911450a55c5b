"""`baton batch` and `status`: what is asked of a cluster that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.command_line import (
    INTERRUPTED,
    ApiKey,
    Http,
    clear_ends,
    clear_errors,
    fail,
    local_cluster,
    say,
)
from deploy.option_group import takes
from deploy.tls_options import TlsOptions


@takes(TlsOptions)
def batch(
    tls: TlsOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True, dir_okay=False, help="Requests, one in a line, as OpenAI's batches."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where answers go; lines without one go to FILE with .errors in its name."
            " Default: beside the input, .results.jsonl.",
        ),
    ] = None,
    batch_id: Annotated[
        str, typer.Option("--id", help="Go on with a batch that was begun, instead of a file.")
    ] = "",
    window: Annotated[
        str, typer.Option(help="The batch ends after this time with what there is.")
    ] = "24h",
    http: Http = None,
    api_key: ApiKey = "",
) -> None:
    """Run a file of requests in the slack that other traffic leaves, and wait for the results.

    Exit code 0: all lines were answered; 3: not all; 1: it could not be run. Ctrl-C leaves the
    batch running.
    """
    from baton.client import HttpClient  # noqa: PLC0415
    from baton.errors import BatonError  # noqa: PLC0415
    from deploy.batch_command import BatchCommand, run_batch  # noqa: PLC0415

    if (file is None) == (not batch_id):
        fail("give a file, or --id and a batch's id")
    cluster = local_cluster(http)
    url, files = tls.url_of(http, cluster), tls.files(cluster)
    with clear_errors(), HttpClient(url, api_key, tls=files) as client:
        command = BatchCommand(client, say, Console(stderr=True))
        try:
            code = run_batch(command, file, batch_id, window, output)
        except (BatonError, OSError) as error:
            fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(code)


@takes(TlsOptions)
def status(
    tls: TlsOptions,
    http: Http = None,
    api_key: ApiKey = "",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Go on showing it, with rates and latencies, until Ctrl-C."),
    ] = False,
    interval: Annotated[
        float, typer.Option(min=1, help="Seconds between two pictures of --watch.")
    ] = 1.0,
) -> None:
    """Show the router's health and what each worker does; exit code 1 when it is not healthy.

    Where keys are required health alone is shown without one.
    """
    from deploy.status import pairs_table, read_status, slots_table, table  # noqa: PLC0415
    from deploy.watch_command import watch as watch_router  # noqa: PLC0415

    cluster = local_cluster(http)
    url, files = tls.url_of(http, cluster, operators=True), tls.files(cluster)
    if watch:
        with clear_ends():
            watch_router(url, api_key, interval, Console(), tls=files)
    with clear_errors():
        found = read_status(url, cluster, api_key, files)
    console = Console()
    console.print(f"router {found.http}: {found.health}", markup=False, highlight=False)
    if found.supervisor:
        console.print(f"supervisor: {found.supervisor}", markup=False, highlight=False)
    if found.autoscaler:
        console.print(f"autoscaler: {found.autoscaler}", markup=False, highlight=False)
    if found.withheld and not found.workers:
        console.print(
            f"workers are not shown without --api-key: {found.withheld}",
            markup=False,
            highlight=False,
        )
    else:
        console.print(table(found))
    if found.slots:
        console.print()
        console.print(slots_table(found))
    if found.pairs:
        console.print()
        console.print(pairs_table(found))
    raise typer.Exit(0 if found.healthy else 1)
