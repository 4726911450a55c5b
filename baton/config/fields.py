"""Common parts of the configuration's sections: their base class, and checks of single values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the configuration. It cannot be changed, and refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def split_host_port(address: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 host stands in brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
"""A path that is valid in processes with other working directories too; empty stays empty."""
