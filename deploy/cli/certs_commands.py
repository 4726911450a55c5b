"""`baton certs`: a cluster's private CA and its certificates."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from baton.security.tls import PeerRole
from deploy.cli.options.command_line import clear_errors, fail
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.output import print_table

if TYPE_CHECKING:
    from deploy.certificates import Shown

_SOON_DAYS = 30
"""A certificate that expires within this number of days is shown in yellow."""
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the certificates.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--san",
        metavar="HOST",
        help="Host name or address of the cluster's machines; repeatable. Loopback and this"
        " machine's name are always included.",
    ),
]
Days = Annotated[
    int, typer.Option(min=1, max=36500, metavar="DAYS", help="Validity of certificates.")
]


def init(
    folder: Folder = Path("certs"),
    san: Hosts = None,
    days: Days = 365,
    ca_days: Annotated[
        int, typer.Option(min=1, max=36500, metavar="DAYS", help="Validity of the CA.")
    ] = 3650,
    name: Annotated[
        str, typer.Option(help="Name of the cluster, as certificates show it.")
    ] = "baton",
) -> None:
    """Create a private CA and the certificates of a cluster.

    There is one for each role: router, worker, supervisor, client, monitor (Prometheus) and redis.

        baton certs init certs --san 10.0.0.1 --san baton.example.com
        baton serve --certs certs
    """
    with clear_errors():
        from deploy import certificates  # noqa: PLC0415

        certificates.init(folder, san or (), cluster=name, days=days, authority_days=ca_days)
        _print(certificates.show(folder))
    typer.echo(
        f"\nServe with them:  baton serve --certs {folder}\nClients trust {folder / 'ca.pem'}:  "
        f"baton status --ca {folder / 'ca.pem'}\nKeep {folder / 'ca.key'} secret, and away from "
        "the cluster's machines: it signs certificates."
    )


def renew(
    folder: Folder = Path("certs"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Renew only this certificate, as `show` names it; repeatable."
        ),
    ] = None,
    san: Hosts = None,
    days: Days = 365,
) -> None:
    """Replace certificates with new ones that have new keys.

    They are signed by the same CA, for the same hosts. Running processes load them without a
    restart.
    """
    with clear_errors():
        from deploy import certificates  # noqa: PLC0415

        certificates.renew(folder, only or (), san or (), days=days)
        _print(certificates.show(folder))


def issue(
    name: Annotated[str, typer.Argument(help="Name of the files: NAME.pem and NAME.key.")],
    folder: Folder = Path("certs"),
    role: Annotated[
        PeerRole, typer.Option(help="Role of the process that shows the certificate.")
    ] = "client",
    san: Hosts = None,
    days: Days = 365,
) -> None:
    """Sign one more certificate.

    For example for another client, or for a worker's machine.

        baton certs issue gpu-node-2 --role worker --san 10.0.0.2
    """
    if (folder / f"{name}.pem").exists():
        fail(f"{folder / name}.pem exists: `baton certs renew --only {name}` replaces it")
    with clear_errors():
        from deploy import certificates  # noqa: PLC0415

        typer.echo(certificates.issue(folder, name, role, san or (), days=days))


def show(folder: Folder = Path("certs")) -> None:
    """Show the roles, hosts and expiry of certificates.

    Exit code 4: one of them is unusable.
    """
    with clear_errors():
        from deploy import certificates  # noqa: PLC0415

        shown = certificates.show(folder)
    _print(shown)
    faulty = any(one.fault for one in shown)
    raise typer.Exit(ExitCode.UNHEALTHY if faulty else ExitCode.OK)


def _print(shown: list[Shown]) -> None:
    now = datetime.now(UTC)
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "role", "valid until", "days", "key", "hosts"):
        table.add_column(heading, no_wrap=heading != "hosts", overflow="fold")
    for one in shown:
        left = (one.expires - now).days
        state = Text(one.fault or str(left))
        if one.fault or left < _SOON_DAYS:
            state.stylize("red" if one.fault else "yellow")
        table.add_row(
            one.name,
            ", ".join(one.roles) or "none",
            f"{one.expires:%Y-%m-%d}",
            state,
            "here" if one.has_key else "not here",
            ", ".join(one.names),
        )
    print_table(table)
