"""The extras of the distribution: packages that few users need, and how to install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from baton.errors import ConfigError

DISTRIBUTION = "baton-llm"
Extra = Literal["bench", "gguf", "nixl", "otel", "s3"]


def install_command(extra: Extra) -> str:
    """Return the shell command that installs ``extra`` next to an installed Baton."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


@contextmanager
def needs_extra(extra: Extra, what: str) -> Iterator[None]:
    """Wrap imports of packages of ``extra``. ``what`` names the feature that needs them, for the
    error message.

    Raises ConfigError if a package cannot be imported. The message has the command that installs
    it.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the extra {extra} ({error}): {install_command(extra)}"
        ) from error
