"""How `baton` shows its commands' help and reports wrong command lines."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from deploy.command_line import complain, say
from deploy.exit_codes import ExitCode


class BatonCommand(TyperCommand):
    """A command whose flags are shown without a value."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.help = _reflowed(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))


class BatonGroup(TyperGroup):
    """A group of commands; the outermost one reports errors."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.help = _reflowed(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line, and report what is wrong with it as all errors are reported."""
        given = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*given, **extra)
        try:
            code = super().main(*given, **extra)
        except typer.TyperException as error:
            code = _report(error)
        except typer.Abort:
            code = ExitCode.INTERRUPTED
        sys.exit(code or ExitCode.OK)


def _report(error: typer.TyperException) -> int:
    """The exit code. Without arguments a group shows its help, and has no message."""
    message = error.format_message()
    if message:
        complain(message)
        context = getattr(error, "ctx", None)
        if context is not None:
            say(f"Run `{context.command_path} --help` for the options.")
    return error.exit_code


def _without_flag_types(parameters: Sequence[Any]) -> list[Any]:
    for one in parameters:
        if isinstance(one, TyperOption) and one.is_flag and one.metavar is None:
            one.metavar = ""
    return list(parameters)


def _reflowed(text: str | None) -> str | None:
    """With paragraphs of one line each: they are wrapped to the width of the terminal."""
    if not text:
        return text
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
