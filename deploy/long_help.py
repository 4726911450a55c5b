"""Help of a command with many options: each has a line of its own, and its meaning below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

if TYPE_CHECKING:
    import typer
    from typer.core import TyperCommand

_WIDEST = 100
"""Characters of a line. Longer ones are hard to read."""


def show_help(command: TyperCommand, ctx: typer.Context) -> None:
    """Print it to standard output, in the panels that the options name."""
    console = Console(highlight=False)
    width = min(console.width, _WIDEST)
    console.print(Padding(Text(command.get_usage(ctx), style="bold yellow"), 1), width=width)
    for paragraph in (command.help or "").split("\n\n"):
        text = Text(" ".join(paragraph.split()))
        console.print(Padding(text, (0, 1, 1, 1)), width=width)
    panels: dict[str, list[Any]] = {}
    for parameter in command.get_params(ctx):
        if not getattr(parameter, "hidden", False):
            name = getattr(parameter, "rich_help_panel", None) or "Options"
            panels.setdefault(name, []).append(parameter)
    for name, parameters in panels.items():
        panel = Panel(_entries(parameters), title=name, title_align="left", border_style="dim")
        console.print(panel, width=width)


def _entries(parameters: Iterable[Any]) -> Group:
    lines: list[Any] = []
    for parameter in parameters:
        lines.append(_heading(parameter))
        lines.append(Padding(Text(parameter.help or ""), (0, 0, 0, 4)))
    return Group(*lines)


def _heading(parameter: Any) -> Text:
    """``--policy predictive|round_robin`` or ``--prefill N (1 to 1024)``."""
    if parameter.param_type_name == "argument":
        return Text(str(parameter.metavar), style="bold cyan")
    names = list(parameter.opts)
    if parameter.secondary_opts and parameter.help.endswith("Default: on."):
        # What one wants to type is how to turn it off.
        names += parameter.secondary_opts
    heading = Text(", ".join(names), style="bold cyan")
    if not parameter.is_flag:
        heading.append(f" {parameter.metavar}", style="yellow")
    least, most = parameter.min, parameter.max
    if most is not None:
        heading.append(f" ({least or 0} to {most})", style="dim")
    elif least:
        heading.append(f" (at least {least})", style="dim")
    return heading
