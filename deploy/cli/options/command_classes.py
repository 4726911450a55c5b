"""Help and error messages of `baton`'s commands."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from deploy.cli.options.command_line import complain, say
from deploy.cli.options.exit_codes import ExitCode


class BatonCommand(TyperCommand):
    """A command whose help has a line for each option, with the option's description below it."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.help = _reflowed(self.help)
        for one in self.params:
            if isinstance(one, TyperArgument) and one.metavar is None:
                one.metavar = one.name.upper()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from deploy.cli.options.long_help import show_help  # noqa: PLC0415

        show_help(self, ctx)


class BatonGroup(TyperGroup):
    """A group of commands; the outermost one reports errors."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        super().__init__(*arguments, **fields)
        self.help = _reflowed(self.help)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the group's parameters. Flags are shown without a value."""
        parameters = list(super().get_params(ctx))
        for one in parameters:
            if isinstance(one, TyperOption) and one.is_flag and one.metavar is None:
                one.metavar = ""
        return parameters

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line, and report usage errors in the same form as all errors."""
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
    """Report an error of the command line and return the exit code.

    A group without arguments shows its help instead.
    """
    unknown: Any = error
    if getattr(error, "possibilities", None):
        from deploy.cli.options.config_options import old_options  # noqa: PLC0415

        # A flag that is itself refused must not be suggested.
        refused = {flag for old in old_options() for flag in old.flags}
        unknown.possibilities = [one for one in unknown.possibilities if one not in refused]
    message = error.format_message()
    if message:
        complain(message)
        context = getattr(error, "ctx", None)
        if context is not None:
            say(f"Run `{context.command_path} --help` for the options.")
    return error.exit_code


def _reflowed(text: str | None) -> str | None:
    """Join the lines of each paragraph, which is wrapped to the width of the terminal later.

    Indented paragraphs are examples, and keep their lines.
    """
    if not text:
        return text
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else paragraph.replace("\n", " ")
        for paragraph in paragraphs
    )
