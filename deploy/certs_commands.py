"""`baton certs`: a cluster's own certificates."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.command_line import clear_errors, fail

if TYPE_CHECKING:
    from deploy.certificates import Shown

_SOON_DAYS = 30
"""A certificate that ends within so many days is told in yellow."""
Folder = Annotated[
    Path, typer.Argument(help="The folder of the certificates. Default: certs.", show_default=False)
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--san",
        metavar="HOST",
        help="A name or address by which others reach the cluster's machines; may be repeated."
        " Those of the loopback interface and this machine's name are always there.",
    ),
]
Days = Annotated[
    int, typer.Option(min=1, max=36500, help="How long certificates are valid, in days.")
]


def init(
    folder: Folder = Path("certs"),
    san: Hosts = None,
    days: Days = 365,
    ca_days: Annotated[
        int, typer.Option(min=1, max=36500, help="How long the authority is, in days.")
    ] = 3650,
    name: Annotated[str, typer.Option(help="The cluster's, for people.")] = "baton",
) -> None:
    """Make an authority and the certificates of a cluster: of routers, workers, the supervisor,
    the API's clients, Prometheus and Redis."""
    from deploy import certificates  # noqa: PLC0415

    with clear_errors():
        certificates.init(folder, san or (), cluster=name, days=days, authority_days=ca_days)
        _print(certificates.show(folder))
    typer.echo(
        f"\nBring the cluster up with them:  baton up --certs {folder}"
        f"\nClients trust {folder / 'ca.pem'}:  baton status --ca {folder / 'ca.pem'}"
        f"\nKeep {folder / 'ca.key'} to yourself, away from the cluster's machines: it signs."
    )


def renew(
    folder: Folder = Path("certs"),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of these alone, as `show` calls them; repeatable."),
    ] = None,
    san: Hosts = None,
    days: Days = 365,
) -> None:
    """Replace certificates by new ones with new keys, of the same authority and for the same
    hosts. What listens takes them up by itself."""
    from deploy import certificates  # noqa: PLC0415

    with clear_errors():
        certificates.renew(folder, only or (), san or (), days=days)
        _print(certificates.show(folder))


def issue(
    name: Annotated[str, typer.Argument(help="Of the files: NAME.pem and NAME.key.")],
    folder: Folder = Path("certs"),
    role: Annotated[
        str, typer.Option(help="router, worker, supervisor, client, monitor or redis.")
    ] = "client",
    san: Hosts = None,
    days: Days = 365,
) -> None:
    """Sign one more certificate: for another client, or for a worker's machine."""
    from baton.tls import ROLES  # noqa: PLC0415
    from deploy import certificates  # noqa: PLC0415

    known = next((one for one in ROLES if one == role), None)
    if known is None:
        fail(f"--role: {role!r} is none of {', '.join(ROLES)}")
    if (folder / f"{name}.pem").exists():
        fail(f"{folder / name}.pem is there already: `baton certs renew --only {name}` replaces it")
    with clear_errors():
        typer.echo(certificates.issue(folder, name, known, san or (), days=days))


def show(folder: Folder = Path("certs")) -> None:
    """Show what the certificates stand for and when they end; exit code 1 where one is of no
    use."""
    from deploy import certificates  # noqa: PLC0415

    with clear_errors():
        shown = certificates.show(folder)
    _print(shown)
    raise typer.Exit(1 if any(one.fault for one in shown) else 0)


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
    Console().print(table)
