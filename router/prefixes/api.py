"""``/v1/cache/prefixes``: clients compute prefixes ahead of their prompts, and pin them."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request

from baton.errors import InvalidRequest
from baton.store.pin_store import Pin
from router.core.request import GenerationRequest
from router.dialects.tools import tool_use
from router.http.client import caller_of, unless_disconnected
from router.http.fields import validate
from router.http.openapi import ERRORS, json_body, made_of_its_id
from router.inference.builder import Arrival
from router.inference.cache_fields import MAX_TTL_S
from router.inference.sampling_input import SamplingInput
from router.inference.service import InferenceService
from router.openai.api import prompts_of
from router.openai.history import openai_turns
from router.prefixes.pinning import Pinned, PrefixPinning
from router.prefixes.protocol import (
    DEFAULT_TTL_S,
    MAX_NAME_CHARACTERS,
    PinAnswer,
    PinnedPrefix,
    PinRequest,
    PrefixDeleted,
    PrefixList,
    PrefixUsage,
)

PATH = "/v1/cache/prefixes"
_PIN = f"{PATH}/{{prefix_id}}"
_COMPUTED = SamplingInput(temperature=0.0, max_tokens=1)


class PrefixApi:
    """The handlers of ``/v1/cache/prefixes``. They raise BatonError, which ``router.http.errors``
    converts to a response."""

    def __init__(self, service: InferenceService, pinning: PrefixPinning) -> None:
        self._service = service
        self._pinning = pinning

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        example = {"prompt": "You are a helpful assistant. " * 8, "ttl": 3600}
        app.add_api_route(
            PATH,
            self.pin,
            methods=["POST"],
            tags=["cache"],
            responses={200: made_of_its_id("prefix_id", ("delete", _PIN)), **ERRORS},
            openapi_extra=json_body(PinRequest, example),
        )
        app.add_api_route(PATH, self.pins, tags=["cache"])
        app.add_api_route(
            _PIN,
            self.unpin,
            methods=["DELETE"],
            tags=["cache"],
            responses={404: ERRORS[404]},
        )

    async def pin(self, request: Request) -> PinAnswer:
        """Compute a prefix and pin its blocks for a time. Repeating it extends the pin."""
        service, received_at = self._service, time.monotonic()
        caller = caller_of(request)
        with service.counting_refusals(caller):
            name = f"prefix-{secrets.token_hex(16)}"
            async with service.bodies.object(request, caller.principal.tenant) as raw:
                body = validate(PinRequest, raw)
                max_s = service.config.request_deadline_s
                arrival = Arrival.of(name, received_at, request.headers, max_s, caller)
                built = await self._built(body, arrival)
        work = self._pinning.pin(arrival, built, _ttl_s(body), _name(body))
        return _answer(await unless_disconnected(request.receive, work), self._block)

    async def pins(self, request: Request) -> PrefixList:
        """List the pinned prefixes of the caller's tenant."""
        pins = await self._pinning.pins(caller_of(request).principal.tenant)
        return PrefixList(data=[PinnedPrefix(**_fields(pin, self._block)) for pin in pins])

    async def unpin(self, prefix_id: str, request: Request) -> PrefixDeleted:
        """End a pin. The blocks stay cached until others need the room."""
        await self._pinning.unpin(caller_of(request).principal.tenant, prefix_id)
        return PrefixDeleted(id=prefix_id)

    @property
    def _block(self) -> int:
        return self._service.config.block_size

    async def _built(self, body: PinRequest, arrival: Arrival) -> GenerationRequest:
        builder = self._service.builder
        if body.model is not None:
            builder.check_model(body.model)
        # Check these before anything is tokenized.
        _ttl_s(body)
        _name(body)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            tools = tool_use(body.tools, None, parallel=None)
            turns = openai_turns(body.messages)
            built = await builder.chat(arrival, turns, _COMPUTED, tools=tools, ending="closed")
        else:
            if body.tools:
                raise InvalidRequest("tools are possible only with messages", param="tools")
            (built,) = await builder.prompts(arrival, prompts_of(body.prompt or ""), _COMPUTED)
        return replace(built, prompt_only=True)


def _ttl_s(body: PinRequest) -> float:
    """Return for how long a body requests its pin, in seconds. Raises InvalidRequest."""
    ttl_s = DEFAULT_TTL_S if body.ttl is None else body.ttl
    if not 1 <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl must be between 1 and {MAX_TTL_S} seconds", param="ttl")
    return float(ttl_s)


def _name(body: PinRequest) -> str:
    """Return the name that a body gives its pin. Raises InvalidRequest."""
    name = body.name or ""
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(
            f"name may have at most {MAX_NAME_CHARACTERS} characters", param="name"
        )
    return name


def _fields(pin: Pin, block: int) -> dict[str, Any]:
    return {
        "id": pin.id,
        "name": pin.name,
        "tokens": pin.tokens,
        "pinned_tokens": pin.blocks * block,
        "created_at": int(pin.created_at),
        "expires_at": int(pin.expires_at),
    }


def _answer(pinned: Pinned, block: int) -> PinAnswer:
    usage = PrefixUsage(
        prompt_tokens=pinned.pin.tokens,
        cached_tokens=pinned.cached_tokens,
        cache_write_tokens=pinned.written_tokens,
    )
    return PinAnswer(**_fields(pinned.pin, block), usage=usage)
