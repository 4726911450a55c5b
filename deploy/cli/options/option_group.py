"""Options that several commands share: the fields of a dataclass, as typer reads parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

GroupT = TypeVar("GroupT")


def takes(group: type[GroupT]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose first argument is a ``group``: its fields become options.

    These options come after the command's own. ``group`` is a dataclass whose fields are annotated
    like parameters of commands, and have defaults.
    """
    hints = get_type_hints(group, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)  # type: ignore[arg-type]  # a dataclass, see above
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [*(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *options]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            taken = {option.name: given.pop(option.name) for option in options}
            command(group(**taken), **given)

        # Typer must read the new signature, not that of the wrapped function.
        del run.__wrapped__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate
