"""The version of Baton."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def baton_version() -> str:
    """Return the version of the installed package; ``0+unknown`` for a source tree without one."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return "0+unknown"
