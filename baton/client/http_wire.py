"""What goes over HTTP: bodies, events and errors as values. No I/O."""

from __future__ import annotations

import base64
import functools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import httpx

from baton.client.values import (
    Answer,
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
from baton.errors import (
    BatonError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WorkerFailed,
    classes_by_code,
)
from baton.grammar import Grammar, GrammarKind

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
DEADLINE_HEADER = "x-baton-deadline-ms"
CONNECT_S = 5.0
SILENCE_S = 330.0
"""A server that sends nothing for this long is given up; its own deadline is 300 s by default."""
GRACE_S = 5.0
"""Beyond a request's deadline, for the server's own word that it has passed."""
_DATA = "data: "
_DONE = "[DONE]"
_BYTES = "bytes:"
_LAST_EVENTS = ("response.completed", "response.incomplete")
_FINISHES = {"completed": "stop", "incomplete": "length"}
_FAILURES = {"rate_limit_exceeded": Overloaded, "invalid_prompt": InvalidRequest}
_CLASSES = classes_by_code()


def generation_body(
    what: Mapping[str, Any],
    model: str,
    sampling: Sampling | None,
    options: Mapping[str, Any],
    *,
    stream: bool,
) -> dict[str, Any]:
    """The body of a request. ``options`` are further fields of it, and overrule the others."""
    given = (sampling or Sampling()).given()
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in given["logit_bias"].items()}
    if "grammar" in given:
        given["structured_outputs"] = _structured(given.pop("grammar"))
    if "logprobs" in given and "messages" in what:
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    body = {"model": model, **what, **given}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {**body, **options}


def _structured(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"json_object": True}
        case GrammarKind.JSON_SCHEMA:
            return {"json": json.loads(grammar.text)}
        case GrammarKind.CHOICE:
            return {"choice": json.loads(grammar.text)}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.LARK:
            return {"grammar": grammar.text}


def chat_input(messages: Sequence[Message]) -> dict[str, Any]:
    return {"messages": [asdict(message) for message in messages]}


def headers(api_key: str, deadline_s: float | None = None) -> dict[str, str]:
    """Of any request."""
    made = {"authorization": f"Bearer {api_key}"} if api_key else {}
    if deadline_s is not None:
        made[DEADLINE_HEADER] = str(max(1, math.ceil(deadline_s * 1e3)))
    return made


def timeout(deadline_s: float | None) -> httpx.Timeout:
    """How long to wait for the server's next word."""
    silence_s = SILENCE_S if deadline_s is None else deadline_s + GRACE_S
    return httpx.Timeout(silence_s, connect=CONNECT_S)


def answer(body: Mapping[str, Any]) -> Answer:
    """The first choice of a response."""
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    usage, scores = _usage(body["usage"]), _scores(choice.get("logprobs"))
    return Answer(text or "", choice["finish_reason"], usage, scores, body)


def _readable(read: Callable[[str], Piece | None]) -> Callable[[str], Piece | None]:
    """Has a line that is none of this API's raise WorkerFailed, whatever it is."""

    @functools.wraps(read)
    def checked(line: str) -> Piece | None:
        try:
            return read(line)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise WorkerFailed("the server has sent an event that cannot be read") from error

    return checked


@_readable
def piece(line: str) -> Piece | None:
    """What a line of a stream says, of its first choice. None where it says nothing.

    Raises BatonError where it tells of one, and WorkerFailed where it cannot be read.
    """
    if not line.startswith(_DATA) or line[len(_DATA) :] == _DONE:
        return None
    event = json.loads(line[len(_DATA) :])
    if "error" in event:
        raise error_of(event, 500, None)
    usage = _usage(event["usage"]) if event.get("usage") else None
    choices = event["choices"]
    if not choices:
        return Piece("", usage=usage, raw=event)
    choice = choices[0]
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    scores = _scores(choice.get("logprobs"))
    return Piece(text or "", choice["finish_reason"], usage, scores, event)


def response_body(
    given: str | Sequence[Message],
    model: str,
    sampling: Sampling | None,
    instructions: str,
    options: Mapping[str, Any],
    *,
    stream: bool,
) -> dict[str, Any]:
    """The body of a request to ``RESPONSES``; ``options`` as in ``generation_body``."""
    items = given if isinstance(given, str) else [asdict(message) for message in given]
    body = generation_body({"input": items}, model, sampling, {}, stream=False)
    if "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    if instructions:
        body["instructions"] = instructions
    return {**body, **({"stream": True} if stream else {}), **options}


def response_answer(body: Mapping[str, Any]) -> Answer:
    """The text of a response."""
    parts = (part for item in body["output"] for part in item.get("content", ()))
    text = "".join(part["text"] for part in parts)
    return Answer(text, _FINISHES.get(body["status"]), _response_usage(body["usage"]), raw=body)


@_readable
def response_piece(line: str) -> Piece | None:
    """What a line of a response's stream says; None where it says nothing.

    Raises BatonError where it tells of one, and WorkerFailed where it cannot be read.
    """
    if not line.startswith(_DATA):
        return None
    event = json.loads(line[len(_DATA) :])
    kind = event.get("type")
    if kind == "response.output_text.delta":
        return Piece(event["delta"], raw=event)
    if kind in _LAST_EVENTS:
        response = event["response"]
        finish = _FINISHES[response["status"]]
        return Piece("", finish, _response_usage(response["usage"]), raw=event)
    if kind == "response.failed":
        error = event["response"]["error"]
        failure = _FAILURES.get(error["code"], WorkerFailed)
        raise failure(error["message"])
    return Piece("", raw=event)


def is_last_event(line: str) -> bool:
    """Whether a line of a response's stream is its last."""
    return line.startswith(tuple(f"event: {kind}" for kind in _LAST_EVENTS))


def is_end(line: str) -> bool:
    """Whether a line of a stream is its last."""
    return line == _DATA + _DONE


def models(body: Mapping[str, Any]) -> tuple[ModelInfo, ...]:
    return tuple(
        ModelInfo(model["id"], model["created"], model.get("max_model_len", 0))
        for model in body["data"]
    )


def embeddings_body(
    inputs: Sequence[str | Sequence[int]], model: str, dimensions: int | None
) -> dict[str, Any]:
    given = [one if isinstance(one, str) else list(one) for one in inputs]
    body = {"model": model, "input": given, "encoding_format": "base64"}
    return body if dimensions is None else body | {"dimensions": dimensions}


def embeddings(body: Mapping[str, Any]) -> Embeddings:
    """Of an answer whose vectors are base64."""
    vectors = (base64.b64decode(one["embedding"]) for one in body["data"])
    return Embeddings(
        tuple(struct.unpack(f"<{len(one) // 4}f", one) for one in vectors),
        Usage(body["usage"]["prompt_tokens"], 0),
    )


def file(body: Mapping[str, Any]) -> FileInfo:
    return FileInfo(
        body["id"],
        body["filename"],
        body["purpose"],
        body["bytes"],
        body["created_at"],
        body.get("expires_at"),
    )


def expiry(seconds: int | None) -> dict[str, str]:
    """The fields of a form for it."""
    if seconds is None:
        return {}
    return {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(seconds)}


def batch(body: Mapping[str, Any]) -> BatchInfo:
    counts = body["request_counts"]
    errors = (body.get("errors") or {}).get("data", [])
    return BatchInfo(
        id=body["id"],
        status=body["status"],
        endpoint=body["endpoint"],
        input_file_id=body["input_file_id"],
        output_file_id=body["output_file_id"],
        error_file_id=body["error_file_id"],
        total=counts["total"],
        completed=counts["completed"],
        failed=counts["failed"],
        expires_at=body["expires_at"],
        faults=tuple(_fault(error) for error in errors),
        raw=body,
    )


def checked(response: httpx.Response) -> httpx.Response:
    """A response that was read. Raises the error that it tells of."""
    if response.is_success:
        return response
    try:
        body = response.json()
    except ValueError:
        body = {}
    raise error_of(body, response.status_code, _retry_after(response.headers))


def error_of(body: Any, status: int, retry_after: float | None) -> BatonError:
    """The error that an error object means; of another server's, one of the same status."""
    told = body.get("error") if isinstance(body, dict) else None
    told = told if isinstance(told, dict) else {}
    message = str(told.get("message") or f"the server answered with status {status}")
    cls = _CLASSES.get(str(told.get("code"))) or _of_status(status)
    return cls(message, param=told.get("param"), retry_after=retry_after)


def unreachable(url: str, error: httpx.HTTPError) -> Unavailable:
    """What is raised when there is no answer."""
    why = str(error) or type(error).__name__
    return Unavailable(f"no answer from {url} ({why})")


def _of_status(status: int) -> type[BatonError]:
    same = [cls for cls in _CLASSES.values() if cls.http_status == status]
    return min(same, key=lambda cls: len(cls.__mro__), default=BatonError)


def _retry_after(given: httpx.Headers) -> float | None:
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = given.get(name, "")
        if value.isascii() and value.isdecimal():
            return int(value) * unit
    return None


def _scores(found: Mapping[str, Any] | None) -> tuple[TokenScore, ...]:
    """Of both endpoints' shapes."""
    if not found:
        return ()
    if "content" in found:
        return tuple(
            TokenScore(
                bytes(one["bytes"]),
                one["logprob"],
                tuple((bytes(top["bytes"]), top["logprob"]) for top in one["top_logprobs"]),
            )
            for one in found["content"] or ()
        )
    tops = found["top_logprobs"] or [None] * len(found["tokens"])
    # The first token of an echoed prompt has none.
    each = zip(found["tokens"], found["token_logprobs"], tops, strict=True)
    return tuple(
        TokenScore(
            _spelled(text),
            0.0 if logprob is None else logprob,
            tuple((_spelled(other), value) for other, value in (top or {}).items()),
        )
        for text, logprob, top in each
    )


def _spelled(text: str) -> bytes:
    """A token as completions have it: those that are half a character are written as bytes."""
    if not text.startswith(_BYTES):
        return text.encode()
    return bytes.fromhex(text[len(_BYTES) :].replace("\\x", ""))


def _response_usage(body: Mapping[str, Any]) -> Usage:
    details = body.get("input_tokens_details") or {}
    return Usage(body["input_tokens"], body["output_tokens"], details.get("cached_tokens") or 0)


def _usage(body: Mapping[str, Any]) -> Usage:
    details = body.get("prompt_tokens_details") or {}
    return Usage(
        body["prompt_tokens"], body["completion_tokens"], details.get("cached_tokens") or 0
    )


def _fault(error: Mapping[str, Any]) -> str:
    place = "" if error.get("line") is None else f"line {error['line']}: "
    return f"{place}{error.get('message')}"
