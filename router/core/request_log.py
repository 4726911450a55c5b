"""Logs a line for each request that has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton.config.cluster import Config
from baton.telemetry.logs import current_request_id
from router.core.accounting import RequestRecorder
from router.core.request import GenerationRequest

log = logging.getLogger("baton.requests")

Show = Callable[[Sequence[int]], str]
"""A function that returns the text of token ids."""
DeviceOf = Callable[[str], tuple[str, str]]
"""A function that returns the device of a worker slot and the quantization of the worker's weights;
empty if unknown."""
CostOf = Callable[[str, int, int, int], str]
"""A function that returns the cost of a request in dollars. Its arguments are the request's class
and its numbers of prompt, cached and generated tokens."""


class RequestLog:
    """Logs a line for each request at its end. The line includes the prompt only if ``log_prompts``
    is set."""

    def __init__(
        self, config: Config, revision: str, show: Show, device_of: DeviceOf, cost_of: CostOf
    ) -> None:
        """Create a log. ``revision`` is the commit of the served model; empty if it has none."""
        self._revision = revision
        self._device_of = device_of
        self._cost_of = cost_of
        self._is_on = config.log_requests or config.log_prompts
        self._show = show if config.log_prompts else None

    def ended(self, request: GenerationRequest, recorder: RequestRecorder) -> None:
        """Log a request that has ended, if the configuration enables the request log. Logged times
        are in milliseconds."""
        if not self._is_on:
            return
        device, quantization = self._device_of(recorder.worker)
        tokens = recorder.prompt_tokens, recorder.cached_tokens, recorder.output_tokens
        told = {
            "request_id": current_request_id(),
            "answer_id": request.request_id,
            "tenant": request.principal.tenant,
            "key": request.principal.key_id,
            "agent": request.agent,
            "run_id": request.run_id,
            "model": request.model,
            "revision": self._revision,
            "quantization": quantization,
            "device": device,
            "prompt_tokens": recorder.prompt_tokens,
            **recorder.summary(),
            "cost": self._cost_of(recorder.context_class, *tokens),
        }
        if self._show is not None:
            told["prompt"] = self._show(request.prompt_ids)
        told = {name: value for name, value in told.items() if value not in ("", None)}
        # The text repeats the fields: text logs show no fields.
        words = " ".join(f"{name}={value!r}" for name, value in told.items())
        log.info("request ended: %s", words, extra=told)
