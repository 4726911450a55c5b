"""Which Baton this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def baton_version() -> str:
    """Of the installed package; ``0+unknown`` where the source tree is used without one."""
    try:
        return version("baton")
    except PackageNotFoundError:
        return "0+unknown"
