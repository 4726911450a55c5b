"""vLLM's options, and their meaning for `baton serve`. The help does not show them.

docs/how-to/migrate-from-vllm.md has the same as a table; a test keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

API_KEY_VARIABLE = "VLLM_API_KEY"

_THINK = (
    *("deepseek_r1", "deepseek_v3", "deepseek-r1", "deepseek-v3", "glm45", "kimi_k2", "minimax_m2"),
    *("qwen3", "qwen3-thinking"),
)
"""Reasoning parsers of vLLM and SGLang that read the text between ``<think>`` markers."""
WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "generation_config": {"vllm": "none"},
        "dtype": {"auto": "bfloat16", "half": "float16", "float": "float32"},
        "quantization": {
            "awq": "auto",
            "awq_marlin": "auto",
            "gptq": "auto",
            "gptq_marlin": "auto",
            "compressed-tensors": "auto",
            "gguf": "auto",
        },
        "kv_dtype": {"fp8_e4m3": "fp8"},
        "tool_parser": {
            "llama3_json": "llama3",
            "llama4_pythonic": "llama4",
            "pythonic": "llama4",
            "qwen3_xml": "qwen3_coder",
            "openai": "harmony",
            "gpt-oss": "harmony",
            "qwen": "hermes",
            "qwen25": "hermes",
            "deepseekv3": "deepseek_v3",
            "deepseekv31": "deepseek_v31",
            "glm": "glm45",
            "minimax-m2": "minimax_m2",
        },
        "reasoning_parser": {
            **dict.fromkeys(_THINK, "think"),
            **dict.fromkeys(("openai_gptoss", "gpt-oss"), "harmony"),
        },
    }
)
"""Baton's name for each choice that vLLM or SGLang names otherwise, by configuration field."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """An option of vLLM that sets a field of Baton's configuration."""

    flags: tuple[str, ...]
    field: tuple[str, ...]
    """The path of the field in the configuration, or in pools if there are ``pools``."""
    pools: Literal["", "all"] = ""
    constant: Any = None
    """The value that the flag sets; None if the flag takes a value."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A flag of vLLM that Baton accepts without effect, since it always does what the flag
    requests."""

    flags: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Refused:
    """An option of vLLM without a counterpart in Baton. ``reason`` explains that, and what to
    do."""

    flags: tuple[str, ...]
    reason: str
    takes_value: bool = True
    harmless: str = ""
    """A value of the option that Baton accepts, because it changes nothing."""


RENAMED = (
    Renamed(("--tensor-parallel-size", "-tp"), ("tp",), "all"),
    Renamed(("--kv-cache-dtype",), ("kv_dtype",)),
    Renamed(("--max-num-seqs",), ("max_sequences",), "all"),
    Renamed(("--max-num-batched-tokens",), ("chunk_tokens",), "all"),
    Renamed(("--gpu-memory-utilization",), ("gpu_memory_fraction",), "all"),
    Renamed(("--tool-call-parser",), ("tool_parser",)),
    Renamed(("-q",), ("quantization",)),
    Renamed(("--ssl-certfile",), ("tls", "certificate")),
    Renamed(("--ssl-keyfile",), ("tls", "key")),
    Renamed(("--enable-log-requests",), ("log_requests",), constant=True),
    Renamed(
        ("--disable-log-requests", "--no-enable-log-requests"), ("log_requests",), constant=False
    ),
)
ACCEPTED = (
    Accepted(("--enable-prefix-caching",), "Baton always reuses cached prefixes"),
    Accepted(("--enable-chunked-prefill",), "Baton always computes prompts in chunks"),
    Accepted(("--enable-reasoning",), "Baton always separates reasoning from the content"),
    Accepted(("--enable-auto-tool-choice",), "Baton always lets the model choose a tool"),
    Accepted(("--trust-remote-code",), "Baton never runs code that comes with a model"),
)
REFUSED = (
    Refused(
        ("--api-key",),
        "every user of this machine can see a key on the command line: put it in a file for"
        f" --api-key-file, or in {API_KEY_VARIABLE}",
    ),
    Refused(
        ("--enforce-eager",),
        "Baton always captures decode steps on GPUs: leave the option out",
        takes_value=False,
    ),
    Refused(
        ("--no-enable-prefix-caching",),
        "Baton always reuses cached prefixes: leave the option out",
        takes_value=False,
    ),
    Refused(
        ("--no-enable-chunked-prefill",),
        "Baton always computes prompts in chunks: leave the option out",
        takes_value=False,
    ),
    Refused(
        ("--pipeline-parallel-size", "-pp"),
        "Baton has no pipeline parallelism: use --tensor-parallel-size",
        harmless="1",
    ),
    Refused(
        ("--data-parallel-size", "-dp"),
        "Baton has pools of workers instead: use --prefill and --decode",
        harmless="1",
    ),
    Refused(
        ("--swap-space",),
        "Baton computes preempted requests again: leave the option out; --kv-host-mib keeps"
        " evicted KV blocks in the host's memory",
        harmless="0",
    ),
    Refused(
        ("--seed",),
        "Baton has no seed for the whole server: send `seed` with each request that needs one",
    ),
    Refused(
        ("--kv-transfer-config",),
        "Baton passes KV between its own pools: leave the option out, or choose a --transport",
    ),
    Refused(
        ("--speculative-config",), "choose a speculative method with --drafter and --draft-model"
    ),
    Refused(("--enable-lora",), "Baton does not serve LoRA adapters", takes_value=False),
    Refused(("--lora-modules",), "Baton does not serve LoRA adapters"),
    Refused(("--chat-template",), "Baton uses the model's own: leave the option out"),
)
