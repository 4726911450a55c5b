"""`baton model`: downloads and lists models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.options.command_line import DEFAULT_MODEL, clear_ends
from deploy.cli.options.output import Output, print_json, print_table


def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Hugging Face id (org/name), or the demo model."),
    ] = DEFAULT_MODEL,
    revision: Annotated[
        str, typer.Option(help="Branch, tag or commit of a Hugging Face model. Default: main.")
    ] = "",
) -> None:
    """Download a model, and print its folder.

    baton model pull Qwen/Qwen3-0.6B
    """
    from rich.console import Console  # noqa: PLC0415

    from deploy.models import model_store  # noqa: PLC0415
    from deploy.models.hub_download import DownloadWatch  # noqa: PLC0415
    from deploy.processes.progress import Progress  # noqa: PLC0415

    progress = Progress(Console(stderr=True))
    step = f"getting the model {name}"
    with clear_ends(), progress.step(step):
        # This is the form for a start without --quantization. Other forms are made from it offline.
        model = model_store.resolve(
            name,
            lambda text: progress.detail(step, text),
            "auto",
            revision,
            DownloadWatch(progress.detail_every_s),
        )
    typer.echo(model.path)


def list_models(output: Output = "table") -> None:
    """List the demo model and the models in the caches."""
    from rich.table import Table  # noqa: PLC0415

    from deploy.models import model_store  # noqa: PLC0415

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
