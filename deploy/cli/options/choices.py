"""Values of options that are not fields of the configuration, for help and completion.

`baton.config.choices` has those of the fields.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Arrivals = Literal["poisson", "gamma", "constant", "ramp", "trace"]
Endpoint = Literal["completions", "chat"]
OutputFormat = Literal["table", "json"]


class Scope(StrEnum):
    """Permissions of an API key. A repeatable option needs an enumeration."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"
