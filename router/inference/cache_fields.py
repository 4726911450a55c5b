"""What clients ask of the prefix cache: OpenAI's fields, and times to live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from baton.errors import InvalidRequest
from baton.request import Retention
from router.core.request import GenerationRequest

MAX_KEY_CHARACTERS = 256
"""Of a ``prompt_cache_key``."""
MAX_TTL_S = 86_400
"""Longest time to live of cached blocks, in seconds: a day, as OpenAI's ``24h``."""
_RETENTIONS = {"in_memory": 0, "in-memory": 0, "24h": MAX_TTL_S}
"""Seconds that OpenAI's values of ``prompt_cache_retention`` ask for."""


class CacheFields(Protocol):
    """The fields of a body that are about the prefix cache."""

    @property
    def prompt_cache_key(self) -> str | None: ...
    @property
    def prompt_cache_retention(self) -> str | None: ...


def with_cache_fields(
    requests: Sequence[GenerationRequest], body: CacheFields
) -> list[GenerationRequest]:
    """The requests of a body, with what it asks of the prefix cache. Raises InvalidRequest."""
    key, retention = body.prompt_cache_key or "", body.prompt_cache_retention or "in_memory"
    if len(key) > MAX_KEY_CHARACTERS:
        raise InvalidRequest(
            f"prompt_cache_key has at most {MAX_KEY_CHARACTERS} characters",
            param="prompt_cache_key",
        )
    if retention not in _RETENTIONS:
        raise InvalidRequest(
            "prompt_cache_retention must be in_memory or 24h", param="prompt_cache_retention"
        )
    ttl_s = _RETENTIONS[retention]
    return [
        replace(
            one,
            cache_key=key,
            retentions=(Retention(len(one.prompt_ids), ttl_s),) if ttl_s else (),
        )
        for one in requests
    ]
