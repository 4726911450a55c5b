"""The OpenAI endpoints: they convert the body of a request to an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from fastapi import Request
from starlette.responses import Response

from baton.errors import InvalidRequest, UnsupportedParameter
from baton.host.background import off_loop
from baton.sampling_params import SCALAR_FIELDS
from router.dialects.tools import check_name, tool_use
from router.http.client import validate
from router.inference.builder import Arrival
from router.inference.cache_fields import with_cache_fields
from router.inference.endpoint import ApiAnswer, Endpoint
from router.inference.prompt import Prompt, Turn, calls_turn, result_turn, with_reasoning
from router.inference.sampling_input import SamplingInput
from router.inference.service import InferenceService
from router.openai.answer import ChatAnswer, CompletionAnswer
from router.openai.answer_details import AnswerDetails
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
    ContentPart,
    Message,
    Model,
    ModelList,
    SamplingFields,
)
from router.openai.structured_output import grammar_of

# `developer` is the newer name of `system`; templates know the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_ROLES = {"tool", "function"}
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
        body = validate(ChatCompletionRequest, raw)
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
        body = validate(CompletionRequest, raw)
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


def openai_turns(messages: Sequence[Message]) -> list[Turn]:
    """Convert the messages of an HTTP body. Raises InvalidRequest, UnsupportedParameter."""
    return _not_empty([_turn(one, f"messages[{place}]") for place, one in enumerate(messages)])


def _turn(message: Message, where: str) -> Turn:
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise UnsupportedParameter(f"{where}.{name} is not supported", param=f"{where}.{name}")
    if message.role == "tool":
        if not message.tool_call_id:
            name = f"{where}.tool_call_id"
            raise InvalidRequest(f"{name} is required", param=name)
        return result_turn(message.tool_call_id, _text(message.content, where))
    role = _role(message.role, where)
    reasoning = (message.reasoning_content or message.reasoning) if role == "assistant" else None
    if not message.tool_calls:
        return with_reasoning({"role": role, "content": _text(message.content, where)}, reasoning)
    if role != "assistant":
        name = f"{where}.tool_calls"
        raise InvalidRequest(f"{name}: only an assistant calls tools", param=name)
    for place, call in enumerate(message.tool_calls):
        check_name(call.function.name, f"{where}.tool_calls[{place}].function.name")
    content = "" if message.content is None else _text(message.content, where)
    functions = ((call.id, call.function) for call in message.tool_calls)
    turn = calls_turn(content, [(one, f.name, f.arguments) for one, f in functions])
    return with_reasoning(turn, reasoning)


def plain_turns(messages: Iterable[tuple[str, str]]) -> list[Turn]:
    """Convert pairs of role and text to turns. Raises InvalidRequest, UnsupportedParameter."""
    return _not_empty(
        [
            {"role": _role(role, f"messages[{place}]"), "content": content}
            for place, (role, content) in enumerate(messages)
        ]
    )


def _not_empty(turns: list[Turn]) -> list[Turn]:
    if not turns:
        raise InvalidRequest("messages must not be empty", param="messages")
    return turns


def _role(role: str, where: str) -> str:
    if role in _TOOL_ROLES:
        raise UnsupportedParameter(
            f"{where}: role '{role}' is not supported here", param=f"{where}.role"
        )
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be system, developer, user, assistant or tool",
            param=f"{where}.role",
        )
    return _ROLES[role]


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{where}.content must not be null", param=f"{where}.content")
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise UnsupportedParameter(f"{where}: only text parts are supported", param=where)
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
    return part.text
