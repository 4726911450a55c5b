"""`baton status`: its options and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deploy.cli.operate.cluster_selection import ClusterId, Target, target
from deploy.cli.options.choices import OutputFormat
from deploy.cli.options.command_line import ApiKey, Http, clear_ends, clear_errors
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.option_group import takes
from deploy.cli.options.output import Output, print_json, print_table
from deploy.cli.options.tls_options import TlsOptions

if TYPE_CHECKING:
    from deploy.cli.operate.status import Status


@takes(TlsOptions)
def status(
    tls: TlsOptions,
    cluster: ClusterId = None,
    http: Http = None,
    api_key: ApiKey = "",
    output: Output = "table",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Refresh until Ctrl-C, and add rates and latencies."),
    ] = False,
    interval: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Seconds between two refreshes of --watch."),
    ] = 1.0,
) -> None:
    """Show the health of a cluster and what each worker does.

    A cluster that requires API keys shows only its health without one. Exit code 4: the cluster is
    not healthy.

        baton status --watch
        baton status --output json
    """
    from deploy.cli.operate.status import read_status  # noqa: PLC0415

    chosen = target(http, cluster, only_reads=True)
    url = tls.url_of(chosen.http, chosen.cluster, operators=True)
    files = tls.files(chosen.cluster, chosen.http or "")
    if watch:
        from deploy.cli.operate.watch import watch as watch_router  # noqa: PLC0415
        from deploy.cli.operate.watch import watch_json  # noqa: PLC0415

        with clear_ends():
            if output == "json":
                watch_json(url, api_key, interval, tls=files)
            watch_router(url, api_key, interval, Console(), tls=files)
    with clear_errors():
        found = read_status(url, chosen.cluster, api_key, files)
    _print(found, chosen, output)
    raise typer.Exit(ExitCode.OK if found.healthy else ExitCode.UNHEALTHY)


def _print(found: Status, chosen: Target, output: OutputFormat) -> None:
    from deploy.cli.operate.status import (  # noqa: PLC0415
        document,
        pairs_table,
        refused_table,
        slots_table,
        table,
    )

    if output == "json":
        print_json(document(found, chosen.cluster))
        return
    typer.echo(chosen)
    typer.echo(f"router {found.http}: {found.health}")
    if found.supervisor:
        typer.echo(f"supervisor: {found.supervisor}")
    if found.host:
        typer.echo(f"host: {found.host}")
    if found.autoscaler:
        typer.echo(f"autoscaler: {found.autoscaler}")
    if found.withheld and not found.workers:
        typer.echo(f"workers are not shown without --api-key: {found.withheld}")
    else:
        print_table(table(found))
    if found.refused:
        typer.echo()
        print_table(refused_table(found))
    if found.slots:
        typer.echo()
        print_table(slots_table(found))
    if found.pairs:
        typer.echo()
        print_table(pairs_table(found))
