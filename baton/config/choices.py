"""The values that fields of the configuration take: literal types, and their constants.

The command line imports this module for help and completion, so that it must not import pydantic.
"""

from __future__ import annotations

from typing import Literal

Role = Literal["prefill", "decode"]
TransportName = Literal["auto", "shm", "grpc", "gloo", "nccl", "cuda_ipc", "nixl"]
LocalPrefill = Literal["auto", "never", "always"]
PolicyName = Literal[
    "predictive", "round_robin", "least_loaded", "prefix", "power_of_two", "session"
]
ToolParserName = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "gemma",
    "glm45",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3",
    "llama4",
    "llama4_json",
    "minimax_m2",
    "mistral",
    "mistral_args",
    "qwen3_coder",
    "smollm",
]
ReasoningParserName = Literal["auto", "none", "think", "mistral", "harmony"]
Dtype = Literal["bfloat16", "float32", "float16"]
Quantization = Literal["auto", "none", "int8", "int4", "fp8"]
KvDtype = Literal["auto", "int8", "fp8"]
"""KV cache type of the cluster; ``auto`` is its ``dtype``."""
KvTypeName = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
"""KV cache type of one pool."""
GenerationConfig = Literal["auto", "none"]
Drafter = Literal["auto", "none", "ngram", "draft", "eagle", "medusa"]
Device = Literal["auto", "cpu", "cuda"]
RankPlacement = Literal["strict_pack", "pack", "spread", "strict_spread"]
Admission = Literal["queue", "slo"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
LogTo = Literal["files", "stdout"]
Scope = Literal["inference", "metrics", "admin"]
BudgetPeriod = Literal["day", "month", "total"]

DEFAULT_TENANT = "default"
"""The tenant of requests that belong to no other."""
BACKGROUND_CLASS = "batch"
"""The class of batch lines, which have no context-length class."""
MIB = 1 << 20
