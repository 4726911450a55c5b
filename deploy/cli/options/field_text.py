"""Texts on a field for help and the reference page: type, unit, default and first sentences."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from baton.config.choices import MIB

_UNITS: tuple[tuple[str, str], ...] = (
    (r"_per_hour$", "currency per hour"),
    (r"^(cached_)?input$|^output$", "$ per million tokens"),
    (r"^budget$", "$"),
    (r"_gflops$", "GFLOP/s"),
    (r"_gb_per_s$", "GB/s"),
    (r"^client_trace_rate$", "requests per second"),
    (r"^requests_per_minute$", "requests per minute"),
    (r"^tokens_per_minute$", "tokens per minute"),
    (r"_s$", "seconds"),
    (r"_mib$", "MiB"),
    (r"_bytes$", "bytes"),
    (r"_port$", "port number"),
    (r"_tokens$|^max_model_len$|^block_size$", "tokens"),
    (r"_ratio$|_fraction$|^target_load$", "fraction"),
    (r"^(tp|cp)$", "ranks"),
    (r"^threads$", "threads"),
    (r"^max_sequences$", "sequences"),
    (r"^count$|^(min|max)_(prefill|decode|workers)$", "workers"),
    (r"^routers$", "processes"),
    (r"^(concurrency|max_waiting_requests|max_batch_in_flight)$", "requests"),
    (r"^max_connections(_per_client)?$", "connections"),
    (r"^weight$", "relative to other tenants"),
    (r"^priority$", "rank, lower first"),
)
_PLACEHOLDERS: tuple[tuple[str, str], ...] = (
    (r"^(http|grpc|admin_http|ray_address)$", "HOST:PORT"),
    (r"_url$|^gcs_store$|_endpoint$", "URL"),
    (r"^(keys_file|certificate|key|client_ca|redis_ca)$", "FILE"),
    (r"^(folder|data_dir|kv_disk_path)$", "FOLDER"),
    (r"^batch_store$", "FOLDER|URL|local"),
    (r"^(model|draft_model)$", "NAME|PATH"),
    (r"^allowed_hosts$", "HOST"),
    (r"^allowed_origins$", "ORIGIN"),
)
_UNIT_PLACEHOLDERS = {"port number": "PORT", "seconds": "SECONDS", "MiB": "MIB", "bytes": "BYTES"}
_MAX_SUMMARY = 110
"""Maximum number of characters of a summary, if it has more than the first sentence of a field's
description."""


def unit_of(name: str) -> str:
    """Return the unit of a numeric field, which follows from its name; empty for fields without a
    unit."""
    return next((unit for pattern, unit in _UNITS if re.search(pattern, name)), "")


def placeholder(name: str, kind: Any) -> str | None:
    """Return the placeholder of an option's value; None for a flag."""
    if kind is bool:
        return None
    if kind in (int, float):
        return _UNIT_PLACEHOLDERS.get(unit_of(name), "N" if kind is int else "NUMBER")
    named = (shown for pattern, shown in _PLACEHOLDERS if re.search(pattern, name))
    return next(named, "TEXT")


def type_text(annotation: Any) -> str:
    """Return the type of a field in plain words, such as ``integer`` or ``one of `a`, `b` ``."""
    arguments = [one for one in get_args(annotation) if one is not type(None)]
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{one}`" if one else "empty" for one in arguments)
    if origin is tuple:
        entry = type_text(arguments[0])
        return f"list of {entry.removeprefix('one of ') if '`' in entry else f'{entry}s'}"
    if origin is dict:
        return "table of numbers"
    if len(arguments) == 1 or (arguments and arguments[0] is datetime):
        return type_text(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return _TYPES.get(annotation, "date and time")


_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def default_text(field: FieldInfo) -> str:
    """Return a field's default as the help shows it; empty if there is no default."""
    value = field.default
    if value in (PydanticUndefined, None, "", ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    size = f" ({value // MIB} MiB)" if isinstance(value, int) and value >= MIB else ""
    return f"{value}{size}"


def summary(field: FieldInfo, flag_of: Callable[[str], str]) -> str:
    """Return the first sentences of a field's description. Names of fields are replaced by what
    ``flag_of`` returns for them."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z`])", " ".join((field.description or "").split()))
    shown = first
    for sentence in others:
        if len(shown) + len(sentence) >= _MAX_SUMMARY:
            break
        shown = f"{shown} {sentence}"
    return re.sub("``(.*?)``", lambda found: flag_of(found[1]), shown)
