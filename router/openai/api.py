"""The OpenAI endpoints: from a body to an answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from baton.config.cluster import Config
from baton.errors import BatonError, InvalidRequest
from baton.grammars.grammar_gate import GrammarGate
from baton.sampling_params import SCALAR_FIELDS
from router.access.access import Access
from router.access.api_keys import Caller
from router.core.choice import Choice, choices_for
from router.core.offload import off_loop
from router.core.request import (
    Dispatcher,
    GenerationRequest,
    OutputDelta,
    ShownText,
    without_answer,
)
from router.core.request_recorder import RequestStats, count_refusal
from router.core.served_model import ServedModel
from router.http.body import read_object, validate
from router.http.disconnect import unless_disconnected
from router.http.sse import DONE, EventStream, EventStreamResponse
from router.inference.delivery import Delivery
from router.inference.request_builder import (
    Arrival,
    Prompt,
    RequestBuilder,
)
from router.inference.sampling_input import SamplingInput
from router.openai.answer import Answer, ChatAnswer, CompletionAnswer, usage_of
from router.openai.answer_details import AnswerDetails, AnswerOptions
from router.openai.answer_options import (
    chat_options,
    completion_options,
    scoring,
    shown_text,
    template_options,
)
from router.openai.banned_words import banned_runs
from router.openai.conversation import openai_turns
from router.openai.grammar_input import grammar_of
from router.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Model,
    ModelList,
    SamplingFields,
)
from router.openai.tool_answer import ToolChatAnswer
from router.openai.unsupported import refuse_unsupported_chat, refuse_unsupported_completion
from router.text.tokenizer import Tokenizer
from router.tool_calls.tools import ToolUse, tool_use

_SAME_FIELDS = (*SCALAR_FIELDS, "logit_bias")


class OpenAiApi:
    """The handlers of one app. They raise BatonError; ``router.http.errors`` answers it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model: ServedModel,
        stats: RequestStats,
        config: Config,
        access: Access,
    ) -> None:
        self._access = access
        self._tokenizer = tokenizer
        self._model = model
        self._metrics = stats.metrics
        self._config = config
        grammars = GrammarGate(
            tokenizer.grammars, stats.metrics.grammar_compile_seconds.labels(role="router").observe
        )
        self._builder = RequestBuilder(dispatcher, tokenizer, model, config, grammars=grammars)
        self._delivery = Delivery(dispatcher, stats, config, show=tokenizer.decode)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        arrival_at = time.monotonic()
        async with self._counting_refusals():
            caller = self._access.caller(request.headers)
            raw = await self._read(request)
            body = validate(ChatCompletionRequest, raw)
            self._builder.check_model(body.model)
            refuse_unsupported_chat(raw)
            options, template = chat_options(body), template_options(body)
            tools = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
            answer = self._chat_answer(body, tools)
            arrival = self._arrival(request, caller, answer, arrival_at)
            turns = openai_turns(body.messages)
            sampling = self._with_options(_chat_sampling(body), body, options)
            one = await self._builder.chat(arrival, turns, sampling, body.priority, tools, template)
            built = _with_choices([one], body, options)
            if not options.plain:
                answer.details = AnswerDetails(
                    options, self._tokenizer, built, [None], is_chat=True
                )
        return await self._answer(request, answer, built, body, arrival, options)

    def _chat_answer(self, body: ChatCompletionRequest, tools: ToolUse | None) -> ChatAnswer:
        usage = _include_usage(body)
        if tools is None:
            return ChatAnswer(body.model, include_usage=usage)
        form = self._builder.tool_format
        return ToolChatAnswer(body.model, form, tools, include_usage=usage)

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        arrival_at = time.monotonic()
        async with self._counting_refusals():
            caller = self._access.caller(request.headers)
            raw = await self._read(request)
            body = validate(CompletionRequest, raw)
            self._builder.check_model(body.model)
            refuse_unsupported_completion(raw)
            prompts = prompts_of(body.prompt)
            options = completion_options(body, len(prompts))
            answer = CompletionAnswer(body.model, include_usage=_include_usage(body))
            arrival = self._arrival(request, caller, answer, arrival_at)
            sampling = self._with_options(sampling_of(body), body, options)
            rows = await self._builder.prompts(arrival, prompts, sampling, priority=body.priority)
            built = _with_choices(rows, body, options)
            if not options.plain or options.best_of > options.n:
                texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
                if body.truncate_prompt_tokens is not None:
                    texts = [None] * len(prompts)
                echoed = sum(len(request.prompt_ids) for request in built) if options.echo else 0
                answer.details = await off_loop(
                    echoed,
                    lambda: AnswerDetails(options, self._tokenizer, built, texts, is_chat=False),
                )
        return await self._answer(request, answer, built, body, arrival, options)

    async def list_models(self, request: Request) -> ModelList:
        """List the models that are served."""
        self._access.caller(request.headers)
        return ModelList(data=[self._model_card()])

    async def get_model(self, model_id: str, request: Request) -> Model:
        """Describe a model."""
        self._access.caller(request.headers)
        self._builder.check_model(model_id)
        return self._model_card()

    def _with_options(
        self, sampling: SamplingInput, body: SamplingFields, options: AnswerOptions
    ) -> SamplingInput:
        logprobs, prompt_logprobs = scoring(options)
        return replace(
            sampling,
            bad_words=banned_runs(self._tokenizer, body.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            no_answer=options.no_answer,
            truncate=body.truncate_prompt_tokens,
        )

    def _model_card(self) -> Model:
        return Model(
            id=self._model.id,
            created=self._model.created,
            root=self._model.id,
            max_model_len=self._builder.context_length,
        )

    async def _read(self, request: Request) -> dict[str, object]:
        deadline_s = self._config.request_deadline_s
        return await read_object(request, self._config.max_body_bytes, deadline_s)

    def _arrival(self, request: Request, caller: Caller, answer: Answer, at: float) -> Arrival:
        max_s = self._config.request_deadline_s
        return Arrival.of(answer.id, at, request.headers, max_s, caller)

    @asynccontextmanager
    async def _counting_refusals(self) -> AsyncIterator[None]:
        try:
            yield
        except BatonError as error:
            count_refusal(self._metrics, error)
            raise
        except ClientDisconnect:
            count_refusal(self._metrics, None)
            raise

    async def _answer(
        self,
        request: Request,
        answer: Answer,
        built: Sequence[GenerationRequest],
        body: SamplingFields,
        arrival: Arrival,
        options: AnswerOptions,
    ) -> Response:
        choices, details = choices_for(built), answer.details
        if body.stream:
            usage = _include_usage(body)
            if usage and body.stream_options and body.stream_options.continuous_usage_stats:
                answer.usage_so_far = choices

            async def work(events: EventStream) -> None:
                async with self._access.entered(arrival.caller, built, choices) as headers:
                    events.headers = headers
                    await self._stream(
                        events, answer, choices, built, arrival.at, options, usage=usage
                    )

            return EventStreamResponse(work)

        async def keep(prompt: int, delta: OutputDelta) -> None:
            place = prompt * options.best_of + delta.choice
            delta = without_answer(delta) if options.no_answer else delta
            choices[place].add(delta, keep_text=True)
            if details is not None:
                details.keep(place, delta)

        async def whole() -> Response:
            async with self._access.entered(arrival.caller, built, choices) as headers:
                await self._delivery.deliver_all(built, arrival.at, keep)
                body = await off_loop(
                    details.entries if details is not None else 0,
                    lambda: _whole(answer, choices),
                )
                return JSONResponse(body, headers=dict(headers))

        return await unless_disconnected(request.receive, whole())

    async def _stream(
        self,
        events: EventStream,
        answer: Answer,
        choices: Sequence[Choice],
        built: Sequence[GenerationRequest],
        received_at: float,
        options: AnswerOptions,
        *,
        usage: bool,
    ) -> None:
        async def show(prompt: int, delta: OutputDelta) -> None:
            place = prompt * options.best_of + delta.choice
            delta = without_answer(delta) if options.no_answer else delta
            choice = choices[place]
            first = not choice.begun
            choice.add(delta, keep_text=False)
            payloads = answer.chunks(place, delta, first=first)
            if payloads:
                await events.send(payloads)

        await self._delivery.deliver_all(built, received_at, show)
        last = [answer.usage_chunk(choices)] if usage else []
        await events.end([*last, DONE])


def _whole(answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer that is not streamed; its usage is that of all that was drawn."""
    if answer.details is None:
        return answer.whole(choices).model_dump()
    places = answer.details.best()
    body = answer.whole([choices[place] for place in places]).model_dump()
    body["usage"] = usage_of(choices).model_dump()
    answer.details.complete(body, places)
    return body


def _with_choices(
    built: Sequence[GenerationRequest], body: SamplingFields, options: AnswerOptions
) -> Sequence[GenerationRequest]:
    shown = shown_text(body)
    if options.best_of == 1 and shown == ShownText():
        return built
    return [replace(request, choices=options.best_of, shown=shown) for request in built]


def _include_usage(body: SamplingFields) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
    return bool(body.stream_options.include_usage)


def sampling_of(body: SamplingFields, max_tokens: int | None = None) -> SamplingInput:
    """``max_tokens`` is what an endpoint calls otherwise."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    given = {name: getattr(body, name) for name in _SAME_FIELDS}
    allowed = body.allowed_token_ids
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    return SamplingInput(
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        **given,
        **grammar_of(body),
    )


def _chat_sampling(body: ChatCompletionRequest) -> SamplingInput:
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one", param="max_completion_tokens"
        )
    return sampling_of(body, body.max_completion_tokens)


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """Each text, and each list of token ids, of what may be one alone."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [tuple(prompt)]
    rows = cast(list[str | list[int]], prompt)
    return [row if isinstance(row, str) else tuple(row) for row in rows]
