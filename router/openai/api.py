"""The OpenAI endpoints: from a body to an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from fastapi import Request
from starlette.responses import Response

from baton.errors import InvalidRequest
from baton.host.background import off_loop
from baton.sampling_params import SCALAR_FIELDS
from router.http.client import validate
from router.inference.builder import Arrival, Prompt
from router.inference.endpoint import Answer, Endpoint
from router.inference.sampling_input import SamplingInput, banned_runs
from router.inference.service import InferenceService
from router.openai.answer import ChatAnswer, CompletionAnswer, ToolChatAnswer
from router.openai.answer_details import AnswerDetails
from router.openai.answer_options import (
    AnswerOptions,
    chat_options,
    completion_options,
    scoring,
    shown_text,
    template_options,
)
from router.openai.conversation import openai_turns
from router.openai.grammar_input import grammar_of
from router.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Model,
    ModelList,
    SamplingFields,
    refuse_unsupported_chat,
    refuse_unsupported_completion,
)
from router.tool_calls.tools import tool_use

_SAME_FIELDS = (*SCALAR_FIELDS, "logit_bias")


class OpenAiApi:
    """The handlers of one app. They raise BatonError; ``router.http.errors`` answers it."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._builder = service.builder
        self._tokenizer = service.tokenizer
        self._model = service.model
        self.chat = Endpoint(service, "chatcmpl-", self._chat)
        self.plain = Endpoint(service, "cmpl-", self._completion)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self.chat.answer(request)

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        return await self.plain.answer(request)

    async def _chat(self, raw: dict[str, Any], arrival: Arrival) -> Answer:
        body = validate(ChatCompletionRequest, raw)
        self._builder.check_model(body.model)
        refuse_unsupported_chat(raw)
        options, template = chat_options(body), template_options(body)
        tools = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        request = await self._builder.chat(
            arrival,
            openai_turns(body.messages),
            self._with_options(_chat_sampling(body), body, options),
            body.priority,
            tools,
            template,
            choices=options.best_of,
            shown_text=shown_text(body),
        )
        details = None
        if not options.plain:
            details = AnswerDetails(options, self._tokenizer, [request], [None], is_chat=True)
        parts = (arrival.request_id, body.model, [request], options, details)
        stream = bool(body.stream)
        if tools is None:
            return ChatAnswer(*parts, stream=stream)
        return ToolChatAnswer(*parts, self._builder.tool_format, tools, stream=stream)

    async def _completion(self, raw: dict[str, Any], arrival: Arrival) -> Answer:
        body = validate(CompletionRequest, raw)
        self._builder.check_model(body.model)
        refuse_unsupported_completion(raw)
        prompts = prompts_of(body.prompt)
        options = completion_options(body, len(prompts))
        requests = await self._builder.prompts(
            arrival,
            prompts,
            self._with_options(sampling_of(body), body, options),
            priority=body.priority,
            choices=options.best_of,
            shown_text=shown_text(body),
        )
        details = None
        if not options.plain or options.best_of > options.n:
            texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
            if body.truncate_prompt_tokens is not None:
                texts = [None] * len(prompts)
            echoed = sum(len(one.prompt_ids) for one in requests) if options.echo else 0
            details = await off_loop(
                echoed,
                lambda: AnswerDetails(options, self._tokenizer, requests, texts, is_chat=False),
            )
        parts = (arrival.request_id, body.model, requests, options, details)
        return CompletionAnswer(*parts, stream=bool(body.stream))

    async def list_models(self, request: Request) -> ModelList:
        """List the models that are served."""
        self._service.access.caller(request.headers)
        return ModelList(data=[self._model_card()])

    async def get_model(self, model_id: str, request: Request) -> Model:
        """Describe a model."""
        self._service.access.caller(request.headers)
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
