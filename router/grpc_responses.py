"""baton.v1.ResponseService: ``/v1/responses`` in typed messages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc.aio

from baton.config import Config
from baton.errors import InvalidRequest
from baton.grpc_errors import grpc_boundary
from baton.v1 import responses_pb2, responses_pb2_grpc
from router.api_keys import Caller
from router.exchange import Event, Exchange
from router.grpc_call import Context, arrival_of, check_size, metadata_of, write_to
from router.grpc_sampling import grpc_sampling
from router.grpc_tools import grpc_tool_use
from router.responses.answer import Repeated
from router.responses.asked import ResponseAsked, begun
from router.responses.items import response_turns

Message = responses_pb2.CreateResponseResponse

_STATUSES = {
    "in_progress": responses_pb2.RESPONSE_STATUS_IN_PROGRESS,
    "completed": responses_pb2.RESPONSE_STATUS_COMPLETED,
    "incomplete": responses_pb2.RESPONSE_STATUS_INCOMPLETE,
}


class ResponseServicer(responses_pb2_grpc.ResponseServiceServicer):
    """The same checks, deadlines and accounts as the HTTP front."""

    def __init__(self, exchange: Exchange, config: Config, model_id: str) -> None:
        self._exchange = exchange
        self._config = config
        self._model_id = model_id

    def add_to(self, server: grpc.aio.Server) -> str:
        """See ``router.grpc_call.Service``."""
        responses_pb2_grpc.add_ResponseServiceServicer_to_server(self, server)
        return responses_pb2.DESCRIPTOR.services_by_name["ResponseService"].full_name

    # A coroutine that writes: see ``router.grpc_front``.
    async def CreateResponse(  # type: ignore[override]  # noqa: N802
        self, request: responses_pb2.CreateResponseRequest, context: Context
    ) -> None:
        """Stream an answer's events."""
        received_at = time.monotonic()
        exchange = self._exchange
        async with grpc_boundary(context):
            async with exchange.counting_refusals():
                metadata = metadata_of(context)
                caller: Caller = exchange.caller(metadata)
                check_size(request, self._config)
                model = request.model or self._model_id
                exchange.builder.check_model(model)
                answer, built, arrival = await begun(
                    exchange,
                    _asked(request, model),
                    lambda name: arrival_of(
                        context, metadata, caller, name, received_at, self._config
                    ),
                )
            numbers = itertools.count()

            async def begin(headers: Mapping[str, str]) -> None:
                if headers:
                    await context.send_initial_metadata(tuple(headers.items()))

            async def send(events: Sequence[Event]) -> None:
                for event in events:
                    message = _message(event)
                    if message is not None:
                        message.sequence_number = next(numbers)
                        await write_to(context, message, self._config)

            await exchange.stream(answer, built, arrival, begin, send)


def _asked(request: responses_pb2.CreateResponseRequest, model: str) -> ResponseAsked:
    """Raises InvalidRequest."""
    sampling = grpc_sampling(request.sampling)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            raise InvalidRequest(f"{name} is for Generate alone", param=name)
    items = [_item(item, f"input[{place}]") for place, item in enumerate(request.input)]
    return ResponseAsked(
        response_turns(items, request.instructions),
        sampling,
        Repeated(
            model,
            request.instructions,
            request.metadata,
            sampling.max_tokens,
            parallel_tool_calls=not request.tools.single,
        ),
        request.priority if request.HasField("priority") else None,
        grpc_tool_use(request.tools),
    )


def _item(item: responses_pb2.InputItem, where: str) -> Event:
    """As HTTP has it."""
    match item.WhichOneof("item"):
        case "message":
            return {"type": "message", "role": item.message.role, "content": item.message.text}
        case "function_call":
            call = item.function_call
            about = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            return {"type": "function_call", **about}
        case "function_call_output":
            result = item.function_call_output
            about = {"call_id": result.call_id, "output": result.output}
            return {"type": "function_call_output", **about}
        case _:
            raise InvalidRequest(f"{where}: an item is required", param=where)


def _message(event: Event) -> Message | None:
    """An event's message; None for one that is left out here."""
    write = _WRITERS.get(event["type"])
    if write is None:
        return None
    message = Message()
    write(message, event)
    return message


def _write_created(message: Message, event: Event) -> None:
    message.created.CopyFrom(_response(event["response"]))


def _write_done(message: Message, event: Event) -> None:
    message.done.CopyFrom(_response(event["response"]))


def _write_item_added(message: Message, event: Event) -> None:
    message.output_item_added.output_index = event["output_index"]
    message.output_item_added.item.CopyFrom(_output_item(event["item"]))


def _write_item_done(message: Message, event: Event) -> None:
    message.output_item_done.output_index = event["output_index"]
    message.output_item_done.item.CopyFrom(_output_item(event["item"]))


def _copier(name: str, *fields: str) -> Callable[[Message, Event], None]:
    """Writes these fields, and whose they are, into the part of this name."""

    def write(message: Message, event: Event) -> None:
        part = getattr(message, name)
        for field in ("output_index", "item_id", *fields):
            setattr(part, field, event[field])
        part.SetInParent()

    return write


_WRITERS: Mapping[str, Callable[[Message, Event], None]] = {
    "response.created": _write_created,
    "response.output_item.added": _write_item_added,
    "response.output_text.delta": _copier("output_text_delta", "delta"),
    "response.output_text.done": _copier("output_text_done", "text"),
    "response.function_call_arguments.delta": _copier("function_call_arguments_delta", "delta"),
    "response.function_call_arguments.done": _copier(
        "function_call_arguments_done", "name", "arguments"
    ),
    "response.output_item.done": _write_item_done,
    "response.completed": _write_done,
    "response.incomplete": _write_done,
}


def _response(response: Mapping[str, Any]) -> responses_pb2.Response:
    usage = response["usage"]
    return responses_pb2.Response(
        id=response["id"],
        created_at=response["created_at"],
        model=response["model"],
        status=_STATUSES[response["status"]],
        output=map(_output_item, response["output"]),
        usage=None if usage is None else _usage(usage),
        metadata=response["metadata"],
    )


def _usage(usage: Mapping[str, Any]) -> responses_pb2.ResponseUsage:
    return responses_pb2.ResponseUsage(
        input_tokens=usage["input_tokens"],
        cached_input_tokens=usage["input_tokens_details"]["cached_tokens"],
        output_tokens=usage["output_tokens"],
    )


def _output_item(item: Mapping[str, Any]) -> responses_pb2.OutputItem:
    found = responses_pb2.OutputItem(id=item["id"], status=_STATUSES[item["status"]])
    if item["type"] == "message":
        found.message.text = "".join(part["text"] for part in item["content"])
        found.message.SetInParent()
        return found
    call = found.function_call
    call.call_id, call.name, call.arguments = item["call_id"], item["name"], item["arguments"]
    return found
