"""Loads the configuration of a command. An invalid configuration ends the command."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.options.command_line import fail, say

if TYPE_CHECKING:
    from baton.config.cluster import Config
    from baton.config.sources import Flag


def load(file: Path | None, flags: Iterable[Flag] = (), **values: Any) -> Config:
    """Load the configuration; ends the command with exit code 1 and a list of all errors.

    It warns about environment variables that look like misspelled fields.
    """
    from baton.config.cluster import Config, load_config  # noqa: PLC0415
    from baton.config.sources import unknown_variables  # noqa: PLC0415
    from baton.errors import ConfigError  # noqa: PLC0415

    for warning in unknown_variables(Config):
        say(f"warning: {warning}")
    try:
        return load_config(file, flags, **values)
    except ConfigError as error:
        fail(*error.message.splitlines())
