"""Conversions between gRPC messages and the client's values. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from baton.client.values import Message, ModelCard, Piece, Sampling, TokenScore, Usage
from baton.errors import BatonError, Unavailable
from baton.rpc.convert import write_grammar
from baton.rpc.grpc_errors import CODE_KEY, error_from_rpc
from baton.sampling_params import SCALAR_FIELDS
from baton.v1 import inference_pb2 as pb
from baton.v1.sampling_pb2 import SamplingParameters
from baton.v1.tools_pb2 import Tools

_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that every call carries."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def generate_request(
    *,
    model: str,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[pb.ChatMessage] | None,
    sampling: SamplingParameters | None,
    n: int = 1,
    tools: Tools | None = None,
) -> pb.GenerateRequest:
    """Build a request. Raises ValueError unless exactly one of ``prompt``, ``token_ids`` and
    ``messages`` is given."""
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise ValueError("give one of prompt, token_ids and messages")
    request = pb.GenerateRequest(model=model, sampling=sampling, n=n, tools=tools)
    if prompt is not None:
        request.prompt = prompt
    elif token_ids is not None:
        request.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
    else:
        request.messages.CopyFrom(pb.ChatMessages(messages=messages))
    return request


def chat_messages(messages: Sequence[Message]) -> list[pb.ChatMessage]:
    return [pb.ChatMessage(role=message.role, content=message.content) for message in messages]


def prompt_input(prompt: str | Sequence[int]) -> dict[str, Any]:
    """Return the arguments of ``generate_request`` for a text or for token ids."""
    return {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}


def sampling_message(sampling: Sampling | None) -> SamplingParameters:
    given = (sampling or Sampling()).given()
    message = SamplingParameters(**{n: given[n] for n in SCALAR_FIELDS if n in given})
    if "logprobs" in given:
        message.logprobs = given["logprobs"]
    if "grammar" in given:
        write_grammar(message.grammar, given["grammar"])
    message.allowed_token_ids.extend(given.get("allowed_token_ids", ()))
    message.stop.extend(given.get("stop", ()))
    message.stop_token_ids.extend(given.get("stop_token_ids", ()))
    for token, bias in given.get("logit_bias", {}).items():
        message.logit_bias[token] = bias
    return message


def piece(response: pb.GenerateResponse) -> Piece:
    usage = None
    if response.HasField("usage"):
        usage = Usage(
            response.usage.prompt_tokens,
            response.usage.completion_tokens,
            response.usage.cached_prompt_tokens,
            response.usage.written_prompt_tokens,
            response.usage.reasoning_tokens,
        )
    scores = tuple(map(_score, response.logprobs)) if response.logprobs else ()
    return Piece(
        response.text, _FINISH.get(response.finish_reason), usage, scores, response.reasoning
    )


def _score(token: pb.TokenLogprob) -> TokenScore:
    top = tuple((other.text, other.logprob) for other in token.top)
    return TokenScore(token.text, token.logprob, top)


def models(answer: pb.ListModelsResponse) -> tuple[ModelCard, ...]:
    return tuple(
        ModelCard(model.id, model.created, model.context_length) for model in answer.models
    )


def meant(rpc: Any, address: str) -> BatonError:
    """Return the BatonError for a call to ``address`` that failed.

    ``rpc`` is the exception that the call raised, in the blocking or in the asyncio API.
    """
    from_router = CODE_KEY in dict(rpc.trailing_metadata() or ())
    if rpc.code() is grpc.StatusCode.UNAVAILABLE and not from_router:
        return Unavailable(f"no router answers at {address} ({rpc.details()})")
    return error_from_rpc(rpc, address)
