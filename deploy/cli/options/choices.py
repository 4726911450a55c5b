"""The values that options take, for help and completion.

Those of the configuration are repeated here: `baton.config.cluster` imports pydantic, which the
command line does not load before it runs a command that needs it. A test keeps both in step.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Arrivals = Literal["poisson", "gamma", "constant", "ramp", "trace"]
Dtype = Literal["bfloat16", "float32", "float16"]
Endpoint = Literal["completions", "chat"]
KvDtype = Literal["auto", "int8", "fp8"]
OutputFormat = Literal["table", "json"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
Role = Literal["prefill", "decode"]


class Scope(StrEnum):
    """What an API key allows. An option that may be repeated takes an enumeration."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"
