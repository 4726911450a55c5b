"""The paths beside OpenAI's older two endpoints: their handlers, and how FastAPI describes them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from router.core.served_model import ServedModel
from router.embeddings.api import EmbeddingsApi
from router.embeddings.protocol import EmbeddingsRequest, EmbeddingsResponse
from router.http.gate import Handler
from router.http.openapi import ERRORS, json_body, streamed
from router.inference.exchange import Exchange
from router.inference.token_desk import TokenDesk
from router.messages.api import MessagesApi
from router.messages.protocol import CountTokensRequest, MessagesRequest
from router.openai.tokenize_api import (
    Detokenized,
    DetokenizeRequest,
    ModelInfo,
    TokenizeApi,
    Tokenized,
    TokenizeRequest,
)
from router.responses.api import ResponsesApi
from router.responses.protocol import ResponsesRequest
from router.text.tokenizer import Tokenizer

EMBEDDINGS = "/v1/embeddings"


def add_more_routes(
    app: FastAPI,
    exchange: Exchange,
    tokenizer: Tokenizer,
    model: ServedModel,
) -> dict[str, Handler]:
    """Adds the paths to ``app``; gives those that may go past it, with their handlers."""
    responses = ResponsesApi(exchange)
    messages = MessagesApi(exchange)
    tokens = TokenizeApi(exchange, TokenDesk(exchange.builder, tokenizer, model))
    embeddings = EmbeddingsApi(exchange, model)
    direct: dict[str, Handler] = {
        EMBEDDINGS: embeddings.create,
        "/v1/responses": responses.create,
        "/v1/messages": messages.create,
    }
    described: list[tuple[str, Any, str, type[BaseModel], dict[str, Any]]] = [
        ("/v1/responses", responses.create, "openai", ResponsesRequest, streamed()),
        (EMBEDDINGS, embeddings.create, "openai", EmbeddingsRequest, {"model": EmbeddingsResponse}),
        ("/v1/messages", messages.create, "anthropic", MessagesRequest, streamed()),
        ("/v1/messages/count_tokens", messages.count_tokens, "anthropic", CountTokensRequest, {}),
        ("/tokenize", tokens.tokenize, "tokens", TokenizeRequest, {"model": Tokenized}),
        ("/detokenize", tokens.detokenize, "tokens", DetokenizeRequest, {"model": Detokenized}),
    ]
    for path, handler, tag, body, answer in described:
        # Anthropic's errors have another shape.
        known = {} if tag == "anthropic" else ERRORS
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            tags=[tag],
            response_model=None,
            responses={200: answer, **known},
            openapi_extra=json_body(body),
        )
    app.add_api_route(
        "/v1/model/info", tokens.model_info, tags=["tokens"], response_model=ModelInfo
    )
    return direct
