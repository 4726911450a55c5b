"""Help of one command: each option has its own line, and its description below."""

from __future__ import annotations

from collections.abc import Iterable, Set
from enum import Enum
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from deploy.cli.options.command_line import CONNECTION

if TYPE_CHECKING:
    import typer
    from typer.core import TyperCommand

_MAX_WIDTH = 100
"""Maximum number of characters in a line of help. Longer lines are hard to read."""
_TYPES = {"int": "N", "float": "NUMBER", "str": "TEXT", "path": "FILE", "file": "FILE"}
"""Placeholders of values, by typer's name of their type. Choices are shown as they are."""


def show_help(
    command: TyperCommand,
    ctx: typer.Context,
    leave_out: Set[str] = frozenset(),
    note: str = "",
) -> None:
    """Print the help to standard output, in the panels that the options name.

    ``leave_out`` has the names of options that are not shown. ``note`` is printed at the end.
    """
    console = Console(highlight=False)
    width = min(console.width, _MAX_WIDTH)
    # Typer puts required arguments in braces, which mean a choice elsewhere.
    usage = command.get_usage(ctx).replace("{", "").replace("}", "")
    console.print(Padding(Text(usage, style="bold yellow"), 1), width=width)
    for paragraph in (command.help or "").split("\n\n"):
        console.print(Padding(Text(paragraph), (0, 1, 1, 1)), width=width)
    panels: dict[str, list[Any]] = {}
    for parameter in command.get_params(ctx):
        if not getattr(parameter, "hidden", False) and parameter.name not in leave_out:
            panels.setdefault(_panel_of(parameter), []).append(parameter)
    for name in sorted(panels, key=lambda name: name == CONNECTION):
        entries = _entries(panels[name], ctx)
        panel = Panel(entries, title=name, title_align="left", border_style="dim")
        console.print(panel, width=width)
    if note:
        console.print(Padding(Text(note), (0, 1, 1, 1)), width=width)


def _panel_of(parameter: Any) -> str:
    unnamed = "Arguments" if parameter.param_type_name == "argument" else "Options"
    return getattr(parameter, "rich_help_panel", None) or unnamed


def _entries(parameters: Iterable[Any], ctx: typer.Context) -> Group:
    lines: list[Any] = []
    for parameter in parameters:
        lines.append(_heading(parameter, ctx))
        text = f"{parameter.help or ''}{_default(parameter)}"
        lines.append(Padding(Text(text), (0, 0, 0, 4)))
    return Group(*lines)


def _heading(parameter: Any, ctx: typer.Context) -> Text:
    """Return an option's first line, such as ``--policy predictive|round_robin`` or ``--prefill N
    (1 to 1024)``."""
    if parameter.param_type_name == "argument":
        heading = Text(str(parameter.metavar), style="bold cyan")
    else:
        names = list(parameter.opts)
        if parameter.secondary_opts and (parameter.default or parameter.help.endswith(" on.")):
            # Users type the option that turns it off.
            names += parameter.secondary_opts
        heading = Text(", ".join(names), style="bold cyan")
        if not parameter.is_flag:
            heading.append(f" {value_of(parameter, ctx)}", style="yellow")
    notes = list(_notes(parameter))
    if notes:
        heading.append(f" ({', '.join(notes)})", style="dim")
    return heading


def value_of(parameter: Any, ctx: typer.Context) -> str:
    """Return the placeholder of an option's value."""
    if parameter.metavar is not None:
        return str(parameter.metavar)
    kind: str = parameter.display_type(ctx).strip("<>").removesuffix(" range")
    kind = kind.removeprefix("list[").removesuffix("]")
    return _TYPES.get(kind, kind)


def _notes(parameter: Any) -> Iterable[str]:
    """Yield the bounds of an option's value, whether it is required, and its environment
    variable."""
    lower, upper = parameter.min, parameter.max
    if upper is not None:
        yield f"{lower or 0} to {upper}"
    elif lower:
        yield f"at least {lower}"
    if parameter.required and parameter.param_type_name == "option":
        yield "required"
    if parameter.envvar:
        yield f"or ${parameter.envvar}"


def _default(parameter: Any) -> str:
    """Return a sentence with the option's default; empty if there is none, or if it is not to be
    shown."""
    value = parameter.default
    if not parameter.show_default or value is None or value is False or value in ("", [], ()):
        return ""
    values = value if isinstance(value, list | tuple) else [value]
    return f" Default: {', '.join(map(_shown, values))}."


def _shown(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value if isinstance(value, Enum) else value)
