"""Common parts of the configuration's fields: base class, checks of single values, old names.

Old names are not accepted. A value under an old name is rejected, and the error gives the new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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
FieldPath = tuple[str, ...]
"""Path of a field, with its table: ``("autoscaler", "min_prefill")``."""

_AUTOSCALER: Mapping[str, str] = MappingProxyType(
    {
        f"{old}_{what}": f"{new}_{what}"
        for old, new in (("least", "min"), ("most", "max"))
        for what in ("prefill", "decode", "workers")
    }
)
_MOVED_TO_ADVANCED = (
    "heartbeat_s",
    "lease_s",
    "registry_ttl_s",
    "hang_s",
    "engine_hang_s",
    "head_deadline_s",
    "slow_client_s",
    "index_mib",
    "transfer_window_mib",
    "standby",
)
RENAMED: Mapping[FieldPath, FieldPath] = MappingProxyType(
    {
        ("file_most_bytes",): ("max_file_bytes",),
        ("files_most_bytes",): ("max_total_file_bytes",),
        ("batch_most_in_flight",): ("max_batch_in_flight",),
        ("connections_per_client",): ("advanced", "max_connections_per_client"),
        ("tls", "client_authority"): ("tls", "client_ca"),
        ("tls", "redis_authority"): ("tls", "redis_ca"),
        **{(name,): ("advanced", name) for name in _MOVED_TO_ADVANCED},
        **{("autoscaler", old): ("autoscaler", new) for old, new in _AUTOSCALER.items()},
    }
)
"""New path of each renamed field, by its old path."""
REMOVED: Mapping[FieldPath, str] = MappingProxyType(
    {
        ("admission_slo_factor",): 'use `admission`: "queue" for 0, "slo" for other values',
        ("move_budget_ratio",): "Baton limits migrations after failures itself",
        ("move_budget_per_s",): "Baton limits migrations after failures itself",
        ("move_budget_burst",): "Baton limits migrations after failures itself",
        ("poison_quarantine_s",): "the quarantine is always 300 s",
        ("priority_step_s",): "one level of priority is always worth one second of waiting",
        ("autoscaler", "hysteresis"): "it is always 0.15",
        ("autoscaler", "slo_share"): "it is always 0.95",
    }
)
"""What replaces each removed field, by its old path."""


def advice(path: FieldPath) -> str:
    """Return what to do with a field of an old name; empty for any other field."""
    new = RENAMED.get(path)
    if new is not None:
        return f"is now `{'.'.join(new)}`"
    reason = REMOVED.get(path)
    return "" if reason is None else f"was removed: {reason}. Delete it"
