"""A line of the log for each request that has ended, where ``log_requests`` asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton.config.cluster import Config
from router.core.request import GenerationRequest
from router.core.request_recorder import RequestRecorder

log = logging.getLogger("baton.requests")

Show = Callable[[Sequence[int]], str]
"""The text of token ids."""


class RequestLog:
    """Says what became of requests; of what they asked only with ``log_prompts``."""

    def __init__(self, config: Config, show: Show) -> None:
        self._is_on = config.log_requests or config.log_prompts
        self._show = show if config.log_prompts else None

    def ended(self, request: GenerationRequest, recorder: RequestRecorder) -> None:
        """Write the line, if one is wanted. Times are in milliseconds."""
        if not self._is_on:
            return
        told = {
            "request_id": request.request_id,
            "tenant": request.principal.tenant,
            "key": request.principal.key_id,
            "prompt_tokens": len(request.prompt_ids),
            **recorder.summary(),
        }
        if self._show is not None:
            told["prompt"] = self._show(request.prompt_ids)
        told = {name: value for name, value in told.items() if value not in ("", None)}
        # The text says all of it too: a log for people has no fields.
        words = " ".join(f"{name}={value!r}" for name, value in told.items())
        log.info("request ended: %s", words, extra=told)
