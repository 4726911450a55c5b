"""`baton model`: models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from deploy.command_line import DEFAULT_MODEL, clear_errors, say


def pull(
    name: Annotated[
        str, typer.Argument(help="A name that `baton model list` shows.")
    ] = DEFAULT_MODEL,
) -> None:
    """Get a model, so that later starts need no network."""
    from deploy import model_store  # noqa: PLC0415

    with clear_errors():
        # As a start without --quantization wants it; other forms are made of it without a network.
        path = model_store.pull(name, say, "auto")
    typer.echo(path)


def list_models() -> None:
    """List the models that can be pulled and those that are here."""
    from rich.table import Table  # noqa: PLC0415

    from deploy import model_store  # noqa: PLC0415

    drawn = Table("name", "here", "MiB", "source", "path", box=None, pad_edge=False)
    drawn.columns[-1].overflow = "fold"
    for entry in model_store.list_models():
        here, size = ("yes", f"{entry.size / (1 << 20):.0f}") if entry.cached else ("no", "")
        drawn.add_row(entry.name, here, size, entry.source, str(entry.path or ""))
    Console().print(drawn)
