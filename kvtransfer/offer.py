"""Reads what another worker says of itself when a pair is formed: JSON of known fields."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from baton.errors import HandoffError

Offer = TypeVar("Offer")
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
