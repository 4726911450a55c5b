"""`baton usage`: requests, tokens and cost, by tenant, key, class, agent, fingerprint or day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from deploy.cli.operate.cluster_selection import ClusterId, target
from deploy.cli.options.command_line import ApiKey, Http
from deploy.cli.options.option_group import takes
from deploy.cli.options.output import Output, print_json, print_table
from deploy.cli.options.tls_options import TlsOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLUMNS = (
    ("requests", "requests"),
    ("input tokens", "input_tokens"),
    ("cached", "cached_input_tokens"),
    ("output tokens", "output_tokens"),
    ("cost $", "cost"),
    ("successes", "successes"),
    ("failures", "failures"),
    ("$ per success", "cost_per_success"),
)


@takes(TlsOptions)
def usage(
    tls: TlsOptions,
    by: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What to group by: day, tenant, key, class, agent, fingerprint, with commas.",
        ),
    ] = "day",
    start: Annotated[
        str, typer.Option(metavar="YYYY-MM-DD", help="First day in UTC. Default: 30 days.")
    ] = "",
    end: Annotated[
        str, typer.Option(metavar="YYYY-MM-DD", help="Last day in UTC. Default: today.")
    ] = "",
    cluster: ClusterId = None,
    http: Http = None,
    api_key: ApiKey = "",
    output: Output = "table",
) -> None:
    """Show requests, tokens, cost and successful tasks, and budgets.

    A key with the admin scope sees all tenants; other keys see their own.

        baton usage --by agent
        baton usage --by tenant,day --start 2026-11-01 --output json
    """
    from deploy.cli.operate.operator_client import OperatorClient  # noqa: PLC0415

    chosen = target(http, cluster, only_reads=True)
    asked = {"by": by, "start": start, "end": end}
    client = OperatorClient(tls, chosen, api_key, operators=False)
    report = client.get("usage", {name: value for name, value in asked.items() if value})
    if output == "json":
        print_json(report)
        return
    typer.echo(f"{report['start']} to {report['end']} (UTC)")
    print_table(_usage_table(report))
    if report["budgets"]:
        typer.echo()
        print_table(_budgets_table(report["budgets"]))
    if report.get("device_hours"):
        hours = ", ".join(f"{pool} {spent:g}" for pool, spent in report["device_hours"].items())
        typer.echo(f"\ndevice hours: {hours}")


def _usage_table(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in report["by"]:
        table.add_column(name, no_wrap=True)
    for title, _ in _COLUMNS:
        table.add_column(title, no_wrap=True, justify="right")
    for row in report["data"]:
        names = [str(row[name]) or "-" for name in report["by"]]
        table.add_row(*names, *_cells(row))
    if len(report["data"]) != 1:
        blank = [""] * (len(report["by"]) - 1)
        table.add_row("total", *blank, *_cells(report["total"]))
    return table


def _cells(row: dict[str, Any]) -> Sequence[str]:
    values = (row.get(name) for _, name in _COLUMNS)
    return ["-" if value is None else str(value) for value in values]


def _budgets_table(budgets: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("budget of", "name", "period", "used $", "limit $", "state"):
        table.add_column(title, no_wrap=True)
    for one in budgets:
        names = ("kind", "name", "period", "used", "limit", "state")
        table.add_row(*(str(one[name]) for name in names))
    return table
