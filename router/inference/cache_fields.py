"""Request fields that control the prefix cache: OpenAI's fields, and the time to live of cached
blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from baton.errors import InvalidRequest
from baton.request import Retention
from router.core.request import GenerationRequest

MAX_KEY_CHARACTERS = 256
"""Maximum length of a ``prompt_cache_key``."""
MAX_TTL_S = 86_400
"""Maximum time to live of cached blocks, in seconds: a day, as OpenAI's ``24h``."""
_RETENTIONS = {"in_memory": 0, "in-memory": 0, "24h": MAX_TTL_S}
"""Time to live in seconds for OpenAI's values of ``prompt_cache_retention``."""


class CacheFields(Protocol):
    """The prefix cache fields of a request body."""

    @property
    def prompt_cache_key(self) -> str | None: ...
    @property
    def prompt_cache_retention(self) -> str | None: ...


def with_cache_fields(
    requests: Sequence[GenerationRequest], body: CacheFields
) -> list[GenerationRequest]:
    """Return the requests of a body, with the body's prefix cache fields applied. Raises
    InvalidRequest.
    """
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
    if not (key or ttl_s):
        return list(requests)
    return [
        replace(
            one,
            cache_key=key,
            retentions=(Retention(len(one.prompt_ids), ttl_s),) if ttl_s else (),
        )
        for one in requests
    ]
