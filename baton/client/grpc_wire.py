"""What goes over gRPC: messages and values, one made of the other. No I/O."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import grpc

from baton.client.values import (
    BatchInfo,
    Embeddings,
    FileInfo,
    Message,
    ModelInfo,
    Piece,
    Sampling,
    TokenScore,
    Usage,
)
from baton.convert import write_grammar
from baton.errors import BatonError, Unavailable
from baton.grpc_errors import CODE_KEY, error_from_rpc
from baton.sampling_params import SCALAR_FIELDS
from baton.v1 import batches_pb2, embeddings_pb2, files_pb2, responses_pb2
from baton.v1 import inference_pb2 as pb
from baton.v1.sampling_pb2 import SamplingParameters
from baton.v1.tools_pb2 import Tools

COPY_BYTES = 1 << 20
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """Of any call."""
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
    """Raises ValueError when there is not one input."""
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
    """The arguments of ``generate_request`` for a text or for token ids."""
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
        )
    scores = tuple(map(_score, response.logprobs)) if response.logprobs else ()
    return Piece(response.text, _FINISH.get(response.finish_reason), usage, scores)


def _score(token: pb.TokenLogprob) -> TokenScore:
    top = tuple((other.text, other.logprob) for other in token.top)
    return TokenScore(token.text, token.logprob, top)


def response_request(
    given: str | Sequence[Message], model: str, sampling: Sampling | None, instructions: str
) -> responses_pb2.CreateResponseRequest:
    messages = [Message("user", given)] if isinstance(given, str) else given
    said = (responses_pb2.InputMessage(role=one.role, text=one.content) for one in messages)
    return responses_pb2.CreateResponseRequest(
        model=model,
        instructions=instructions,
        input=[responses_pb2.InputItem(message=message) for message in said],
        sampling=sampling_message(sampling),
    )


def response_piece(event: responses_pb2.CreateResponseResponse) -> Piece:
    """What an event says of the text."""
    if event.HasField("output_text_delta"):
        return Piece(event.output_text_delta.delta)
    if not event.HasField("done"):
        return Piece("")
    done = event.done
    cut = done.status == responses_pb2.RESPONSE_STATUS_INCOMPLETE
    usage = done.usage
    return Piece(
        "",
        "length" if cut else "stop",
        Usage(usage.input_tokens, usage.output_tokens, usage.cached_input_tokens),
    )


def embed_request(
    inputs: Sequence[str | Sequence[int]], model: str, dimensions: int | None
) -> embeddings_pb2.EmbedRequest:
    return embeddings_pb2.EmbedRequest(
        model=model,
        inputs=[
            embeddings_pb2.EmbeddingInput(text=one)
            if isinstance(one, str)
            else embeddings_pb2.EmbeddingInput(token_ids=pb.TokenIds(ids=one))
            for one in inputs
        ],
        dimensions=dimensions,
    )


def embeddings(response: embeddings_pb2.EmbedResponse) -> Embeddings:
    usage = Usage(response.usage.prompt_tokens, 0, response.usage.cached_prompt_tokens)
    return Embeddings(tuple(tuple(one.values) for one in response.embeddings), usage)


def upload_parts(
    content: BinaryIO | bytes, filename: str, expires_s: int | None
) -> Iterator[files_pb2.UploadFileRequest]:
    about = files_pb2.FileDescription(filename=filename, expires_after_seconds=expires_s)
    yield files_pb2.UploadFileRequest(description=about)
    source = io.BytesIO(content) if isinstance(content, bytes) else content
    while data := source.read(COPY_BYTES):
        yield files_pb2.UploadFileRequest(data=data)


def file(message: files_pb2.File) -> FileInfo:
    return FileInfo(
        message.id,
        message.filename,
        message.purpose,
        message.size,
        message.created_at,
        message.expires_at if message.HasField("expires_at") else None,
    )


def batch_request(
    input_file_id: str, endpoint: str, completion_window: str, metadata: Mapping[str, str]
) -> batches_pb2.CreateBatchRequest:
    return batches_pb2.CreateBatchRequest(
        input_file_id=input_file_id,
        endpoint=endpoint,
        completion_window=completion_window,
        metadata=metadata,
    )


def batch(message: batches_pb2.Batch) -> BatchInfo:
    status = batches_pb2.BatchStatus.Name(message.status)
    return BatchInfo(
        id=message.id,
        status=status.removeprefix("BATCH_STATUS_").lower(),
        endpoint=message.endpoint,
        input_file_id=message.input_file_id,
        output_file_id=message.output_file_id or None,
        error_file_id=message.error_file_id or None,
        total=message.total,
        completed=message.completed,
        failed=message.failed,
        expires_at=message.expires_at,
        faults=tuple(map(_fault, message.faults)),
    )


def _fault(fault: batches_pb2.BatchFault) -> str:
    return f"line {fault.line}: {fault.message}" if fault.HasField("line") else fault.message


def models(answer: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(
        ModelInfo(model.id, model.created, model.context_length) for model in answer.models
    )


def meant(rpc: Any, address: str) -> BatonError:
    """The error that a failed call means; ``rpc`` is what the call has raised, of either API."""
    from_router = CODE_KEY in dict(rpc.trailing_metadata() or ())
    if rpc.code() is grpc.StatusCode.UNAVAILABLE and not from_router:
        return Unavailable(f"no router answers at {address} ({rpc.details()})")
    return error_from_rpc(rpc, address)
