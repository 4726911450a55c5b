"""`baton model`: models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.command_line import DEFAULT_MODEL, clear_errors, say
from deploy.output import Output, print_json, print_table


def pull(
    name: Annotated[
        str, typer.Argument(help="Name of the model, as `baton model list` shows it.")
    ] = DEFAULT_MODEL,
) -> None:
    """Download a model, so that a later start needs no network."""
    from deploy import model_store  # noqa: PLC0415

    with clear_errors():
        # As a start without --quantization wants it; other forms are made of it without a network.
        path = model_store.pull(name, say, "auto")
    typer.echo(path)


def list_models(output: Output = "table") -> None:
    """List the models on this machine and known ones."""
    from rich.table import Table  # noqa: PLC0415

    from deploy import model_store  # noqa: PLC0415

    if output == "json":
        models = [
            {
                "name": entry.name,
                "cached": entry.cached,
                "bytes": entry.size,
                "source": entry.source,
                "path": str(entry.path) if entry.path else None,
            }
            for entry in model_store.list_models()
        ]
        print_json({"models": models})
        return
    drawn = Table("name", "here", "MiB", "source", "path", box=None, pad_edge=False)
    drawn.columns[-1].overflow = "fold"
    for entry in model_store.list_models():
        here, size = ("yes", f"{entry.size / (1 << 20):.0f}") if entry.cached else ("no", "")
        drawn.add_row(entry.name, here, size, entry.source, str(entry.path or ""))
    print_table(drawn)
