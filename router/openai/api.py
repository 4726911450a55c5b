"""The OpenAI endpoints: they convert the body of a request to an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from fastapi import Request
from starlette.responses import Response

from baton.errors import InvalidRequest
from baton.host.background import off_loop
from baton.sampling_params import SCALAR_FIELDS
from router.dialects.tools import tool_use
from router.http.fields import validate
from router.inference.builder import Arrival
from router.inference.cache_fields import with_cache_fields
from router.inference.endpoint import ApiAnswer, Endpoint
from router.inference.prompt import Prompt
from router.inference.sampling_input import SamplingInput
from router.inference.service import InferenceService
from router.openai.answer import ChatAnswer, CompletionAnswer
from router.openai.answer_details import AnswerDetails
from router.openai.history import openai_turns
from router.openai.options import (
    AnswerOptions,
    chat_options,
    completion_options,
    reasoning_options,
    scoring,
    template_options,
)
from router.openai.parsed_answer import ParsedChatAnswer
from router.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Model,
    ModelList,
    SamplingFields,
)
from router.openai.structured_output import grammar_of

_SAME_FIELDS = (*SCALAR_FIELDS, "logit_bias")


class OpenAiApi:
    """The handlers of the OpenAI endpoints. They raise BatonError, which ``router.http.errors``
    converts to a response."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._builder = service.builder
        self._tokenizer = service.tokenizer
        self._model = service.model
        self.chat = Endpoint(service, "chatcmpl-", self._chat)
        self.completion = Endpoint(service, "cmpl-", self._completion)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self.chat.answer(request)

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        return await self.completion.answer(request)

    async def _chat(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(ChatCompletionRequest, raw, self._service.fields)
        self._builder.check_model(body.model)
        options, (ending, variables) = chat_options(body), template_options(body)
        tools = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        request = await self._builder.chat(
            arrival,
            openai_turns(body.messages),
            await self._with_options(_chat_sampling(body), body, options, arrival),
            body.priority,
            tools,
            choices=options.best_of,
            ending=ending,
            variables=variables,
            reasoning=reasoning_options(body),
        )
        (request,) = with_cache_fields([request], body)
        details = None
        if not options.plain:
            details = AnswerDetails(options, self._tokenizer, [request], [None], is_chat=True)
        parts = (arrival.request_id, body.model, [request], options, details)
        stream = bool(body.stream)
        dialect = self._builder.dialect
        if tools is None and not dialect.answer_texts:
            return ChatAnswer(*parts, stream=stream)
        shows = body.include_reasoning is not False
        return ParsedChatAnswer(*parts, dialect, tools, stream=stream, shows_reasoning=shows)

    async def _completion(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(CompletionRequest, raw, self._service.fields)
        self._builder.check_model(body.model)
        prompts = prompts_of(body.prompt)
        options = completion_options(body, len(prompts))
        requests = await self._builder.prompts(
            arrival,
            prompts,
            await self._with_options(sampling_of(body), body, options, arrival),
            priority=body.priority,
            choices=options.best_of,
        )
        requests = with_cache_fields(requests, body)
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

    async def list_models(self) -> ModelList:
        """List the served models."""
        return ModelList(data=[self._model_card()])

    async def get_model(self, model_id: str) -> Model:
        """Describe a model."""
        self._builder.check_model(model_id)
        return self._model_card()

    async def _with_options(
        self,
        sampling: SamplingInput,
        body: SamplingFields,
        options: AnswerOptions,
        arrival: Arrival,
    ) -> SamplingInput:
        logprobs, prompt_logprobs = scoring(options)
        return replace(
            sampling,
            bad_words=await self._builder.encoder.banned_runs(arrival.tenant, body.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            no_answer=options.no_answer,
            shows_stop_string=bool(body.include_stop_str_in_output),
            shows_special_tokens=body.skip_special_tokens is False,
            truncate=body.truncate_prompt_tokens,
        )

    def _model_card(self) -> Model:
        return Model(
            id=self._model.id,
            created=self._model.created,
            root=self._model.id,
            max_model_len=self._builder.context_length,
            default_sampling_params=dict(self._model.sampling),
        )


def sampling_of(body: SamplingFields, max_tokens: int | None = None) -> SamplingInput:
    """Read the sampling fields of a body. ``max_tokens`` overrides the field of that name."""
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
    """Return the prompts of a completion's body as a list, even if the body gives only one prompt.
    Each prompt is a text or a list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [tuple(prompt)]
    rows = cast(list[str | list[int]], prompt)
    return [row if isinstance(row, str) else tuple(row) for row in rows]
