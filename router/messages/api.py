"""``POST /v1/messages`` and its count of tokens, in Anthropic's shapes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from baton.errors import UnsupportedParameter
from router.http.body import validate
from router.inference.exchange import Exchange
from router.inference.sampling_input import SamplingInput
from router.messages.answer import MessagesAnswer
from router.messages.blocks import message_tools, message_turns
from router.messages.protocol import CountTokensRequest, MessagesRequest


class MessagesApi:
    """The handlers. They raise BatonError; ``router.http.errors`` answers it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def create(self, request: Request) -> Response:
        """Continue a conversation."""
        arrival_at = time.monotonic()
        exchange = self._exchange
        async with exchange.counting_refusals():
            caller = exchange.caller(request.headers)
            raw = await exchange.read(request)
            body = validate(MessagesRequest, raw)
            exchange.builder.check_model(body.model)
            _refuse_unserved(raw)
            use = message_tools(body)
            answer = MessagesAnswer(body.model, exchange.builder.tool_format, use)
            arrival = exchange.arrival(request, caller, answer.id, arrival_at)
            turns = message_turns(body)
            built = await exchange.builder.chat(arrival, turns, _sampling(body), body.priority, use)
        return await exchange.respond(request, answer, built, arrival, stream=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation has as a prompt."""
        exchange = self._exchange
        async with exchange.counting_refusals():
            exchange.caller(request.headers)
            body = validate(CountTokensRequest, await exchange.read(request))
            exchange.builder.check_model(body.model)
            ids = await exchange.builder.chat_ids(message_turns(body), message_tools(body))
        return JSONResponse({"input_tokens": len(ids)})


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    thinking = raw.get("thinking")
    if thinking is not None and thinking != {"type": "disabled"}:
        raise UnsupportedParameter("thinking is not supported", param="thinking")
    for name in ("mcp_servers", "container", "output_format", "output_config"):
        if raw.get(name):
            raise UnsupportedParameter(f"{name} is not supported", param=name)


def _sampling(body: MessagesRequest) -> SamplingInput:
    return SamplingInput(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(body.stop_sequences or ()),
        max_tokens=body.max_tokens,
    )
