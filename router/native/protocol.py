"""Bodies and answers of ``/v1/generate`` and ``/v1/generate/batch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.http.client import Int, Strings
from router.http.fields import RequestBody

MAX_TOKENS, TEMPERATURE = 100, 0.7
"""Default maximum of generated tokens, and default temperature."""
Optimization = Literal["none", "basic", "full"]


class _Body(RequestBody):
    model: str | None = None
    """The served model's id; optional."""
    max_tokens: Int | None = Field(MAX_TOKENS, ge=1)
    """Maximum number of tokens to generate for each prompt."""
    temperature: float | None = Field(TEMPERATURE, ge=0, le=2)
    """0 … 2; 0 takes the most likely token."""
    optimization: Optimization | None = "full"
    """`full`: use the prefix cache and speculative decoding if they help. `basic`: use neither.
    `none`: same as `basic`, since continuous batching cannot be disabled for one request."""


class GenerateRequest(_Body):
    """The body of `POST /v1/generate`."""

    prompt: str
    """Text, as in `/v1/completions`: no chat template is applied."""
    stream: bool | None = False
    """Send the answer as server-sent events while it is generated."""


class BatchGenerateRequest(_Body):
    """The body of `POST /v1/generate/batch`."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stream": (False,)}

    prompts: Strings = Field(min_length=1)
    """Up to 128 texts, which are answered concurrently."""


class Generated(BaseModel):
    """The answer of `POST /v1/generate`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    text: str
    tokens_generated: int
    latency_ms: float
    """Time from the request's receipt to its last token."""
    optimization_used: str
    """The optimizations used for this answer, separated by commas: `continuous_batching`,
    `prefix_cache` if KV of the prompt was found, `speculation=METHOD` if drafted tokens were
    accepted, `quantization=KIND` of the weights. `none` if there were none."""
    finish_reason: Literal["stop", "length"]
    system_fingerprint: str | None
    """Fingerprint of the workers that answered: of their weights, quantization and types."""
    """`length`: `max_tokens` or the end of the context ended the answer."""


class BatchGenerated(BaseModel):
    """The answer of `POST /v1/generate/batch`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    results: list[Generated]
    """One for each prompt, in the same order."""
    total_latency_ms: float
    """Time from the request's receipt to the last token of the last result."""
    throughput_tokens_per_sec: float
    """Tokens of all results divided by that time."""
