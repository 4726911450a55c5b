"""What workers say of themselves when a pair is formed, as JSON; and which host they are on."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from baton.errors import ConfigError, HandoffError

Offer = TypeVar("Offer")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_TYPES: dict[str, type] = {"str": str, "int": int}


def read_offer(kind: type[Offer], data: bytes, transport: str) -> Offer:
    """``kind`` is a dataclass whose fields are ``str`` and ``int``, which are not negative.

    Raises HandoffError for anything else: a peer's pid becomes part of a path, its sizes bounds.
    """
    try:
        offer = kind(**json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise HandoffError(f"the offer of transport {transport} cannot be read") from error
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(offer)  # type: ignore[arg-type]
    for field in fields:
        value = getattr(offer, field.name)
        if type(value) is not _TYPES[str(field.type)]:
            raise HandoffError(f"the offer of transport {transport} cannot be read: {field.name}")
        if type(value) is int and value < 0:
            raise HandoffError(f"the offer of transport {transport} makes no sense: {field.name}")
    return offer


def host_of(transport: str) -> tuple[str, str]:
    """This host's boot ID, and the process namespace: containers have one each by default.

    Raises ConfigError where the system does not tell.
    """
    try:
        return _BOOT_ID.read_text().strip(), os.readlink(_PID_NAMESPACE)
    except OSError as error:
        raise ConfigError(
            f"transport {transport} cannot tell which host and process namespace this is: {error}"
        ) from error


def are_on_two_hosts(offer: bytes, other: bytes) -> bool:
    """Whether two offers of a transport name different hosts. False where either names none."""
    hosts = [_boot_id(each) for each in (offer, other)]
    return None not in hosts and hosts[0] != hosts[1]


def _boot_id(offer: bytes) -> object:
    try:
        return json.loads(offer).get("boot_id")
    except (ValueError, AttributeError, RecursionError):
        return None
