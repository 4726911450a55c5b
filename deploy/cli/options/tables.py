"""Entries of lists of tables on the command line: ``--pool name=long,role=prefill,count=2``."""

from __future__ import annotations

import json
from typing import Any

import typer


def entry_in(text: str, flag: str) -> dict[str, Any]:
    """The table in ``FIELD=VALUE,…`` or in a JSON object, for values that are lists or tables.

    Raises typer.BadParameter. Values of the first form are strings, which the configuration reads
    as it reads environment variables.
    """
    if text.lstrip().startswith("{"):
        try:
            table: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"{flag}: not a JSON object: {error}") from None
        return table
    table = {}
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or not name:
            raise typer.BadParameter(
                f"{flag}: expected FIELD=VALUE,… or a JSON object, not `{part}`"
            )
        if name in table:
            raise typer.BadParameter(f"{flag}: `{name}` is given twice in `{text}`")
        table[name.replace("-", "_")] = value
    return table
