"""Runs third-party clients against a cluster: python -m tests.clients.

Exit code 1 when a check fails, or a client cannot be installed. What the server itself refuses as
not supported is shown as missing, and is no failure without --strict.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from baton.client.http_api import api_errors, open_api
from baton.errors import BatonError
from tests.clients.checking import Outcome, check, chosen, draw


def main(
    url: Annotated[str, typer.Option(help="The cluster's HTTP front.")] = "http://127.0.0.1:8000",
    clients: Annotated[str, typer.Option(help="Names with commas, `light`, or `all`.")] = "light",
    model_path: Annotated[
        str, typer.Option(help="The model's folder, for clients that count tokens.")
    ] = "",
    strict: Annotated[bool, typer.Option(help="What is missing fails, too.")] = False,
) -> None:
    """Check a running cluster with other people's clients."""
    console = Console()
    outcomes: list[Outcome] = []
    try:
        programs = chosen(clients)
        with api_errors(), open_api(url) as client:
            (model,) = client.get("/v1/models").json()["data"]
        for program in programs:
            console.print(f"{program.name} …", highlight=False)
            outcomes += check(program, url, model["id"], model_path)
    except BatonError as error:
        typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    console.print(draw(outcomes))
    bad = {"fail", "missing"} if strict else {"fail"}
    raise typer.Exit(int(any(one.outcome in bad for one in outcomes)))


if __name__ == "__main__":
    typer.run(main)
