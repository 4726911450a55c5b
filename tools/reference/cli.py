"""Makes docs/reference/cli.md from the tree of commands of `baton`."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import typer

from deploy.cli.main import app
from deploy.cli.options import exit_codes
from deploy.cli.options.config_options import ConfigOption, config_options
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.field_text import default_text, unit_of
from deploy.cli.options.long_help import value_of
from tools.reference.markdown import anchor, cell, code, made_from, option_place, table, text

_HEAD = f"""# Commands and options

All commands of `baton`, with their arguments, options and [exit codes](#exit-codes). [The command
line](command-line.md) describes how commands choose a cluster, ask before a change, and print
JSON. `baton COMMAND --help` shows the same options in a terminal.

{made_from("the commands in `deploy/cli`")}
"""
_EXIT_CODES = """
## Exit codes

A code has one meaning in all commands.
"""
_COLUMNS = ("option", "value", "default", "meaning")
_VALUES = {
    "N": "integer",
    "NUMBER": "number",
    "TEXT": "text",
    "FILE": "file",
    "SECONDS": "number, seconds",
    "MIB": "integer, MiB",
    "BYTES": "integer, bytes",
}
"""Words for the types and units of options' values, by their placeholders in the help."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command without subcommands."""

    path: str
    """The command as it is typed: ``baton keys create``."""
    panel: str
    """The panel of the help that lists the command."""
    command: Any
    context: Any

    @property
    def parameters(self) -> list[Any]:
        """Return the arguments and options of the command that help shows."""
        return [
            one
            for one in self.command.get_params(self.context)
            if not getattr(one, "hidden", False) and one.name != "help"
        ]


def commands() -> tuple[Command, ...]:
    """Return all commands, in the order of help."""
    root: Any = typer.main.get_command(app)
    return tuple(_leaves(root, root.make_context("baton", [], resilient_parsing=True), ""))


def _leaves(group: Any, context: Any, panel: str) -> Iterator[Command]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command.hidden:
            continue
        inside = command.make_context(name, [], parent=context, resilient_parsing=True)
        shown = panel or command.rich_help_panel
        if hasattr(command, "list_commands"):
            yield from _leaves(command, inside, shown)
        else:
            yield Command(inside.command_path, shown, command, inside)


def exit_code_meanings() -> dict[ExitCode, str]:
    """Return the documentation of each exit code."""
    tree = ast.parse(inspect.getsource(exit_codes))
    (members,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for statement, comment in itertools.pairwise(members):
        match statement, comment:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(meaning))),
            ):
                found[ExitCode[name]] = meaning
    return found


def reference() -> str:
    """Return the Markdown text of the page on commands."""
    found = commands()
    parts = [_HEAD]
    for panel in dict.fromkeys(one.panel for one in found):
        rows = (
            (f"[{code(one.path)}](#{one.path.replace(' ', '-')})", cell(_summary(one)))
            for one in found
            if one.panel == panel
        )
        parts.append(f"\n**{panel}**\n\n{table(('command', 'what it does'), rows)}\n")
    parts.extend(map(_section, found))
    meanings = exit_code_meanings()
    codes = ((str(int(one)), code(one.name), cell(meanings[one])) for one in ExitCode)
    parts.append(f"{_EXIT_CODES}\n{table(('code', 'name', 'meaning'), codes)}\n")
    return "".join(parts)


def _summary(one: Command) -> str:
    return str(one.command.help or "").partition("\n\n")[0]


def _section(one: Command) -> str:
    usage = one.command.get_usage(one.context).removeprefix("Usage:").strip()
    usage = " ".join(usage.replace("{", "").replace("}", "").split())
    parts = [f"\n## {one.path}\n\n```\n{usage}\n```\n", _description(one.command.help or "")]
    panels: dict[str, list[Any]] = {}
    for parameter in one.parameters:
        panels.setdefault(_panel_of(parameter), []).append(parameter)
    fields = _fields() if one.path == "baton serve" else {}
    for panel in sorted(panels, key=lambda name: name == "Connection"):
        rows = (_row(one, parameter, fields.get(parameter.name)) for parameter in panels[panel])
        title = "" if len(panels) == 1 else f"\n**{panel}**\n"
        head = ("argument" if panel == "Arguments" else "option", *_COLUMNS[1:])
        parts.append(f"{title}\n{table(head, rows)}\n")
    return "".join(parts)


def _description(help_text: str) -> str:
    """Return a command's help as Markdown; indented paragraphs are examples, and become code
    blocks."""
    parts = []
    for paragraph in help_text.split("\n\n"):
        if paragraph.startswith(" "):
            parts.append(f"\n```\n{inspect.cleandoc(paragraph)}\n```\n")
        else:
            parts.append(f"\n{text(paragraph)}\n")
    return "".join(parts)


def _panel_of(parameter: Any) -> str:
    unnamed = "Arguments" if parameter.param_type_name == "argument" else "Options"
    return getattr(parameter, "rich_help_panel", None) or unnamed


def _fields() -> dict[str, ConfigOption]:
    return {option.name: option for option in config_options() if option.panel}


def _row(one: Command, parameter: Any, option: ConfigOption | None) -> tuple[str, ...]:
    meaning = str(parameter.help or "").removesuffix(" Repeatable.")
    default = _default(parameter)
    if option is not None:
        meaning, default = _of_field(meaning, option)
    shown = cell(meaning)
    if option is not None:
        place = (("pools",) if option.pools else ()) + option.path
        name = ".".join(place)
        shown += f" Field [`{name}`](configuration.md#{name})."
    if parameter.envvar:
        shown += f" Variable: {code(parameter.envvar)}."
    return _names(one, parameter), _value(parameter, one.context), default, shown


def _of_field(meaning: str, option: ConfigOption) -> tuple[str, str]:
    """Split an option's help text. Return the text without the sentence on the default, and the
    default."""
    default = default_text(option.field)
    return meaning.replace(f" Default: {default}.", "") if default else meaning, (
        code(default) if default else ""
    )


def _names(one: Command, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return code(str(parameter.metavar))
    names: Sequence[str] = [*parameter.opts, *parameter.secondary_opts]
    place = option_place(one.path, parameter.opts[0])
    return f"{anchor(place)}{'<br>'.join(map(code, names))}"


def _value(parameter: Any, context: Any) -> str:
    """Return a text that describes an option's value: its placeholder or choices, its unit and its
    bounds."""
    if parameter.param_type_name == "argument":
        return ""
    if parameter.is_flag:
        return "none"
    shown = value_of(parameter, context)
    parts = [_VALUES.get(shown) or _choices(shown)]
    unit = unit_of(parameter.name) if shown in ("N", "NUMBER") else ""
    if unit:
        parts.append(unit)
    lower, upper = parameter.min, parameter.max
    if upper is not None:
        parts.append(f"{lower or 0:g} to {upper:g}")
    elif lower:
        parts.append(f"at least {lower:g}")
    if parameter.required:
        parts.append("required")
    if parameter.multiple:
        parts.append("repeatable")
    return ", ".join(parts)


def _choices(shown: str) -> str:
    """Return a placeholder as Markdown. One such as ``a|b`` becomes a list of choices; any other
    one becomes code."""
    if "|" in shown and shown == shown.lower():
        return ", ".join(code(one.strip()) for one in shown.strip("[]").split("|"))
    return code(shown)


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value in ("", [], ()):
        return ""
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(map(code, map(_shown, values)))


def _shown(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value.value if isinstance(value, Enum) else value)
