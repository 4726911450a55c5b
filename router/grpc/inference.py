"""The gRPC API: baton.v1.InferenceService, reflection and grpc.health.v1."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from baton.errors import InvalidRequest
from baton.logprobs import TokenLogprobs
from baton.rpc.convert import finish_to_proto
from baton.rpc.grpc_errors import grpc_boundary
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.core.request import (
    Choice,
    Dispatcher,
    GenerationRequest,
    OutputDelta,
    choices_for,
)
from router.dialects.output import ParsedOutput
from router.grpc.call import Context, Service, arrival_of, check_size, metadata_of, write_to
from router.grpc.health import HealthServicer
from router.grpc.sampling import grpc_sampling
from router.grpc.tokens import TokenServicer
from router.grpc.tools import add_parsed_output, grpc_tool_use, grpc_turns
from router.inference.builder import Arrival
from router.inference.prompt import MAX_VARIABLES_CHARACTERS, Ending, checked_variables
from router.inference.reasoning import Effort, ReasoningInput, checked_budget
from router.inference.service import InferenceService
from router.inference.tokens import TokenService
from router.openai.options import MAX_CHOICES

_MAX_NAME_CHARACTERS = 128
_EFFORTS: Mapping[int, Effort | None] = {
    inference_pb2.REASONING_EFFORT_UNSPECIFIED: None,
    inference_pb2.REASONING_EFFORT_NONE: "none",
    inference_pb2.REASONING_EFFORT_MINIMAL: "minimal",
    inference_pb2.REASONING_EFFORT_LOW: "low",
    inference_pb2.REASONING_EFFORT_MEDIUM: "medium",
    inference_pb2.REASONING_EFFORT_HIGH: "high",
}
_SCORES_AT_ONCE = 64
"""Number of scored prompt tokens that are added to a message before control returns to the event
loop. Each token has up to 20 alternatives."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Implements baton.v1.InferenceService of inference.proto."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._builder = service.builder
        self._access = service.access
        self._tokenizer = service.tokenizer
        self._model = service.model
        self._config = service.config

    # gRPC also accepts a coroutine that writes, and cancels it where it stands if the client
    # leaves. The generated signature only knows generators.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Stream the answer to a request. The last message has the finish reason and the usage."""
        received_at = time.monotonic()
        async with grpc_boundary(context), AsyncExitStack() as stack:
            with self._service.counting_refusals():
                metadata = metadata_of(context)
                caller = self._access.caller(metadata)
            with self._service.counting_refusals(caller):
                caller = await stack.enter_async_context(self._access.visiting(caller))
                name = _name(request)
                own = f"gen-{secrets.token_hex(16)}"
                arrival = arrival_of(context, metadata, caller, own, received_at, self._config)
                priority = request.priority if request.HasField("priority") else None
                self._service.check_place(caller, priority)
                built = await self._build(request, arrival, priority)
            choices = choices_for([built])
            outputs = self._outputs(request, built)
            shows_workers = self._access.may_see_workers(caller)

            async def write(_: int, delta: OutputDelta) -> None:
                choices[delta.choice].add(delta, keep_text=False)
                response = _response(name or built.request_id, delta)
                if shows_workers:
                    response.prefill_worker = delta.prefill_worker
                    response.decode_worker = delta.decode_worker
                ended = all(choice.finish_reason is not None for choice in choices)
                if ended or request.continuous_usage:
                    response.usage.CopyFrom(_usage(choices))
                await self._add_scores(response, delta, built)
                if outputs:
                    output, shows = outputs[delta.choice], not request.reasoning.hidden
                    add_parsed_output(response, output, delta, shows_reasoning=shows)
                await write_to(context, response, self._config)

            async def send_limits(headers: Mapping[str, str]) -> None:
                if headers:
                    await context.send_initial_metadata(tuple(headers.items()))

            await self._service.run(arrival, [built], choices, write, on_admitted=send_limits)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Return a list with the one served model."""
        async with grpc_boundary(context):
            self._access.caller(metadata_of(context))
        model = inference_pb2.Model(
            id=self._model.id,
            created=self._model.created,
            owned_by="baton",
            context_length=self._builder.context_length,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def _build(
        self, request: inference_pb2.GenerateRequest, arrival: Arrival, priority: int | None
    ) -> GenerationRequest:
        check_size(request, self._config)
        self._builder.check_model(request.model or self._model.id)
        sampling = replace(
            grpc_sampling(request.sampling),
            shows_stop_string=request.include_stop_string,
            shows_special_tokens=request.show_special_tokens,
        )
        if request.HasField("truncate_prompt_tokens"):
            sampling = replace(sampling, truncate=request.truncate_prompt_tokens)
        kind, choices = request.WhichOneof("input"), _choices(request)
        if kind == "messages":
            turns, tools = grpc_turns(request.messages.messages), grpc_tool_use(request.tools)
            ending, variables = _template_options(request.template_options)
            return await self._builder.chat(
                arrival,
                turns,
                sampling,
                priority,
                tools,
                choices=choices,
                ending=ending,
                variables=variables,
                reasoning=_reasoning(request.reasoning),
            )
        for name in ("tools", "template_options", "reasoning"):
            if request.HasField(name):
                raise InvalidRequest(f"{name} requires messages as input", param=name)
        if kind is None:
            raise InvalidRequest("set one of prompt, token_ids and messages")
        if kind == "token_ids":
            self._builder.encoder.check_count(len(request.token_ids.ids), "token_ids")
        prompt = request.prompt if kind == "prompt" else tuple(request.token_ids.ids)
        (built,) = await self._builder.prompts(
            arrival, [prompt], sampling, None, priority, choices=choices
        )
        return built

    def _outputs(
        self, request: inference_pb2.GenerateRequest, built: GenerationRequest
    ) -> list[ParsedOutput]:
        """Return a parser of reasoning and tool calls for each choice. The list is empty if the
        request needs no parser."""
        tools = grpc_tool_use(request.tools)
        dialect, begins_in = self._builder.dialect, built.begins_in
        if tools is None and not (built.chat and dialect.answer_texts):
            return []
        return [ParsedOutput(dialect, tools, begins_in) for _ in range(built.choices)]

    async def _add_scores(
        self,
        response: inference_pb2.GenerateResponse,
        delta: OutputDelta,
        request: GenerationRequest,
    ) -> None:
        for token in delta.scored:
            self._add_score(response.logprobs.add(), token.token_id, token.logprobs)
        after_first = zip(request.prompt_ids[1:], delta.prompt_logprobs, strict=False)
        for place, (token_id, logprobs) in enumerate(after_first, 1):
            self._add_score(response.prompt_logprobs.add(), token_id, logprobs)
            if place % _SCORES_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _add_score(
        self, message: inference_pb2.TokenLogprob, token_id: int, logprobs: TokenLogprobs
    ) -> None:
        spelling = self._tokenizer.spelling
        message.token_id, message.text = token_id, spelling(token_id)
        message.logprob = logprobs.logprob
        for top_id, logprob in logprobs.top:
            message.top.add(token_id=top_id, text=spelling(top_id), logprob=logprob)


def _name(request: inference_pb2.GenerateRequest) -> str:
    if len(request.request_id) > _MAX_NAME_CHARACTERS:
        raise InvalidRequest(
            f"request_id has at most {_MAX_NAME_CHARACTERS} characters", param="request_id"
        )
    return request.request_id


def _choices(request: inference_pb2.GenerateRequest) -> int:
    if request.n > MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}", param="n")
    return request.n or 1


def _template_options(message: inference_pb2.TemplateOptions) -> tuple[Ending, dict[str, Any]]:
    if message.variables.ByteSize() > MAX_VARIABLES_CHARACTERS:
        raise InvalidRequest(
            f"template_options.variables have at most {MAX_VARIABLES_CHARACTERS} bytes",
            param="template_options.variables",
        )
    variables = json_format.MessageToDict(message.variables)
    checked_variables(variables, "template_options.variables")
    if message.continue_final_message:
        return "open", variables
    return "closed" if message.no_generation_prompt else "answer", variables


def _reasoning(message: inference_pb2.ReasoningOptions) -> ReasoningInput:
    if message.effort not in _EFFORTS:
        raise InvalidRequest("reasoning.effort is not known", param="reasoning.effort")
    param = "reasoning.budget_tokens"
    budget = message.budget_tokens if message.HasField("budget_tokens") else None
    return ReasoningInput(
        effort=_EFFORTS[message.effort],
        enabled=message.enabled if message.HasField("enabled") else None,
        budget=checked_budget(budget, param),
        budget_param=param,
    )


def _usage(choices: Sequence[Choice]) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=choices[0].prompt_tokens,
        completion_tokens=sum(choice.completion_tokens for choice in choices),
        cached_prompt_tokens=sum(choice.cached_tokens for choice in choices),
        written_prompt_tokens=sum(choice.written_tokens for choice in choices),
        reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
    )


def _response(name: str, delta: OutputDelta) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=name,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=finish_to_proto(delta.finish_reason),
        choice=delta.choice,
        stop_string=delta.stop_string,
        fingerprint=delta.fingerprint,
    )


def add_grpc_services(
    server: grpc.aio.Server,
    service: InferenceService,
    tokens: TokenService,
    dispatcher: Dispatcher,
    *,
    more: Sequence[Service] = (),
) -> None:
    """Add the inference, token, health and reflection services to a server that is not started yet.

    ``more``: further services, which are for operators."""
    inference = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(service), server)
    health = HealthServicer(dispatcher, (inference,), service.config)
    own = TokenServicer(tokens, service.config, service.access)
    names = (
        inference,
        *(one.add_to(server) for one in (own, *more, health)),
        reflection.SERVICE_NAME,
    )
    reflection.enable_server_reflection(names, server)
