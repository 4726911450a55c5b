"""Builds a GenerationRequest from an API's input: tokenizes the prompt, checks fields, and
completes the sampling parameters."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from baton.client.headers import (
    DEADLINE_HEADER,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    is_request_id,
)
from baton.config.cluster import Config
from baton.errors import (
    DeadlineExceeded,
    InvalidGrammar,
    InvalidRequest,
    ModelNotFound,
)
from baton.grammars.grammar_gate import GrammarGate
from baton.grammars.grammar_prover import Proven
from baton.request import NO_TRACE, TraceContext
from baton.security.cluster_secret import cache_salt
from router.access.api_keys import Caller
from router.conversation.turns import Turn
from router.core.request import AnswerPart, Dispatcher, GenerationRequest, ReasoningMarkers
from router.core.served_model import ServedModel
from router.dialects.dialect import dialect_for
from router.dialects.tools import ToolUse
from router.inference.labels import NO_LABELS, Labels
from router.inference.prompt import Ending, Prompt, PromptEncoder
from router.inference.reasoning import (
    NOTHING_ASKED,
    ReasoningInput,
    answer_part,
    budget_of,
    reasoning_span,
    template_variables,
)
from router.inference.sampling_input import (
    MAX_LINE_SCORES,
    MAX_SCORES,
    SamplingInput,
    check_defaults,
    check_scores,
    final_sampling,
    scored_tokens,
    with_defaults,
)
from router.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16
"""Default of ``max_tokens`` for the completions API, as at OpenAI."""
MAX_PROMPTS = 128
"""Maximum number of prompts in one request."""
MAX_EMBEDDED = 2048
"""Maximum number of inputs in one embeddings request, as at OpenAI."""
_BUILT_AT_ONCE = 64
"""Number of requests that are built before control returns to the event loop."""
_SHOWN_ID_CHARACTERS = 128
_LAST_TOKENS = 16
"""Number of tokens at a prompt's end that are searched for a reasoning marker and white space after
it."""

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_EMBEDDED = SamplingInput(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request before its prompt is read, such as its id, deadline and caller."""

    request_id: str
    """Unique id of the request. If the body has several prompts, the id of each one ends with its
    position."""
    at: float
    """Time of the request's arrival, in seconds of the monotonic clock."""
    deadline_s: float
    """Deadline of the request, in seconds after ``at``."""
    caller: Caller
    own_deadline: bool = False
    """Whether the client set the deadline."""
    session: str = ""
    """The client's name for the conversation that the request belongs to; empty if it gave none."""
    trace: TraceContext = NO_TRACE
    """The trace context that the client sent."""
    background: bool = False
    """Whether the request is a background request, such as a batch request line. It waits for spare
    capacity."""
    labels: Labels = NO_LABELS
    call_id: str = ""
    """Id of the HTTP or gRPC call, ``x-request-id``; empty if it has none."""

    @property
    def tenant(self) -> str:
        return self.caller.principal.tenant

    @classmethod
    def of(
        cls,
        request_id: str,
        at: float,
        headers: Mapping[str, str],
        max_s: float,
        caller: Caller,
        *,
        own_deadline: bool = False,
    ) -> Arrival:
        """Build an arrival from ``headers``, whose names are in lower case.

        ``max_s``: the deadline in seconds; the header ``DEADLINE_HEADER`` can only shorten it.
        ``own_deadline``: true if ``max_s`` is the client's own setting. Raises InvalidRequest."""
        given, session = headers.get(DEADLINE_HEADER, ""), headers.get(SESSION_HEADER, "")
        parent, trace = headers.get("traceparent", ""), NO_TRACE
        if parent:
            trace = TraceContext(parent, headers.get("tracestate", ""))
        deadline_s = max_s
        if given:
            if not (given.isascii() and given.isdecimal() and len(given) <= 12 and int(given) > 0):
                raise InvalidRequest(
                    f"{DEADLINE_HEADER} must be a whole number of milliseconds, at least 1",
                    param=DEADLINE_HEADER,
                )
            deadline_s, own_deadline = min(max_s, int(given) / 1000), True
        call_id = headers.get(REQUEST_ID_HEADER, "")
        return cls(
            request_id,
            at,
            deadline_s,
            caller,
            own_deadline,
            session,
            trace,
            labels=Labels.of_headers(headers),
            call_id=call_id if is_request_id(call_id) else "",
        )


class RequestBuilder:
    """Builds requests from the inputs of all APIs. Raises InvalidRequest, subclasses of it, and
    ModelNotFound. Sampling parameters that a client does not set are those of the model."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model: ServedModel,
        config: Config,
        grammars: GrammarGate[Proven],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._model = model
        check_defaults(model.sampling)
        template = tokenizer.chat_template if tokenizer.has_chat_template else None
        self.dialect = dialect_for(
            config.tool_parser,
            config.reasoning_parser,
            template,
            lambda text: bool(tokenizer.special_ids([text])),
        )
        self.encoder = PromptEncoder(
            tokenizer, self.dialect.tools, config, lambda: self.context_length
        )
        """Converts prompts to token ids. APIs that only count a prompt's tokens use it, too."""
        self._clock = clock
        self._grammars = grammars
        self._cluster_secret = config.cluster_secret
        self._background_s = config.request_deadline_s
        """Deadline of a background request, in seconds after its admission."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and answer together. This is the minimum of the values
        of the model and of all workers."""
        # Without workers the dispatcher has no bound. It rejects the request itself.
        return min(self._model.context_length, self._dispatcher.context_length or 1 << 62)

    def check_model(self, model_id: str) -> None:
        """Check that ``model_id`` is the served model. Raises ModelNotFound."""
        if model_id != self._model.id:
            shown = model_id[:_SHOWN_ID_CHARACTERS]
            raise ModelNotFound(f"the model '{shown}' does not exist", param="model")

    async def chat(
        self,
        arrival: Arrival,
        turns: Sequence[Turn],
        sampling: SamplingInput,
        priority: int | None = None,
        tools: ToolUse | None = None,
        *,
        choices: int = 1,
        ending: Ending = "answer",
        variables: Mapping[str, Any] = _NO_VARIABLES,
        reasoning: ReasoningInput = NOTHING_ASKED,
    ) -> GenerationRequest:
        """Build the request for a conversation. By default, its answer may use the rest of the
        context.

        ``ending`` and ``variables``: as in ``PromptEncoder.chat_ids``. Raises InvalidRequest, also
        if a grammar is combined with required tool calls."""
        if tools is not None:
            sampling = self._bound_to(tools, sampling)
        await self._check_grammar(arrival, sampling)
        variables = self.variables(reasoning, variables)
        ids = await self.encoder.chat_ids(
            arrival.tenant, turns, tools, sampling, ending=ending, variables=variables
        )
        texts = self.dialect.answer_texts if tools is None else self.dialect.texts
        shown = tuple(self._tokenizer.special_ids(texts).values())
        request = self._request(
            arrival,
            arrival.request_id,
            ids,
            sampling,
            None,
            "messages",
            priority,
            choices=choices,
            shown_ids=shown,
            chat=True,
        )
        _check_scores(arrival, [request])
        # Tool calls may follow the reasoning instead of content.
        to_content = sampling.grammar_param != "tools" if sampling.grammar else tools is None
        last = self._tokenizer.decode(ids[-_LAST_TOKENS:], skip_special_tokens=False)
        begins_in = answer_part(self.dialect.reasoning, ending, turns[-1]["content"], last)
        return self._reasoning(request, reasoning, begins_in, to_content=to_content)

    def variables(
        self, reasoning: ReasoningInput, given: Mapping[str, Any] = _NO_VARIABLES
    ) -> Mapping[str, Any]:
        """Return the variables for the chat template: those in ``given``, and those that control
        reasoning.

        Raises InvalidRequest.
        """
        return template_variables(reasoning, self._tokenizer.chat_template, given)

    def _reasoning(
        self,
        request: GenerationRequest,
        asked: ReasoningInput,
        begins_in: AnswerPart,
        *,
        to_content: bool,
    ) -> GenerationRequest:
        """Return the request with three fields set: the markers and the token budget of the
        answer's reasoning, and the part in which the answer begins."""
        form = self.dialect.reasoning
        if form is None:
            return request
        return dataclasses.replace(
            request,
            begins_in=begins_in,
            reasoning_markers=ReasoningMarkers(
                form.start, (form.end, *form.calls_end_it), repeat=bool(form.answer)
            ),
            reasoning_span=reasoning_span(
                form,
                begins_in,
                budget_of(asked, self._tokenizer.chat_template),
                request.sampling,
                self._tokenizer.marker_ids,
                asked.budget_param,
                to_content=to_content,
            ),
        )

    def _bound_to(self, tools: ToolUse, sampling: SamplingInput) -> SamplingInput:
        """Return the sampling parameters. If tool calls are required or a function is strict, add a
        grammar. Raises InvalidRequest if the client set another grammar."""
        special = self._tokenizer.special_ids(self.dialect.tools.texts)
        if sampling.grammar is not None and not tools.required:
            return sampling
        if sampling.grammar is not None:
            raise InvalidRequest(
                "a structured answer cannot be combined with required tool calls",
                param="tool_choice",
            )
        grammar = None
        if tools.required:
            grammar = self.dialect.tools.calls_grammar(tools, special)
        elif any(tool.strict for tool in tools.callable_tools):
            grammar = self.dialect.tools.free_grammar(tools, special)
        return dataclasses.replace(sampling, grammar=grammar, grammar_param="tools")

    async def prompts(
        self,
        arrival: Arrival,
        prompts: Sequence[Prompt],
        sampling: SamplingInput,
        default_max_tokens: int | None = COMPLETION_MAX_TOKENS,
        priority: int | None = None,
        *,
        param: str = "prompt",
        max_prompts: int = MAX_PROMPTS,
        choices: int = 1,
        embeds: bool = False,
    ) -> list[GenerationRequest]:
        """Build one request for each plain prompt.

        ``default_max_tokens``: the maximum length of an answer if the client sets none; None means
        the rest of the context. ``param``: the name of the client's field that has the prompts."""
        if not prompts:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        if len(prompts) > max_prompts:
            raise InvalidRequest(f"at most {max_prompts} {param}s are possible", param=param)
        await self._check_grammar(arrival, sampling)
        rows = await self.encoder.prompt_ids(arrival.tenant, prompts, sampling, param)
        requests: list[GenerationRequest] = []
        for place, ids in enumerate(rows):
            requests.append(
                self._request(
                    arrival,
                    f"{arrival.request_id}-{place}",
                    ids,
                    sampling,
                    default_max_tokens,
                    param,
                    priority,
                    choices=choices,
                    embeds=embeds,
                )
            )
            if place % _BUILT_AT_ONCE == _BUILT_AT_ONCE - 1:
                await asyncio.sleep(0)
        _check_scores(arrival, requests)
        return requests

    async def embeddings(
        self,
        arrival: Arrival,
        inputs: Sequence[Prompt],
        *,
        truncate: int | None = None,
        priority: int | None = None,
    ) -> list[GenerationRequest]:
        """Build one request for each text or list of token ids to embed. ``truncate``: see
        ``SamplingInput``."""
        if not all(inputs):
            raise InvalidRequest("input must not be empty", param="input")
        return await self.prompts(
            arrival,
            inputs,
            dataclasses.replace(_EMBEDDED, truncate=truncate),
            1,
            priority,
            param="input",
            max_prompts=MAX_EMBEDDED,
            embeds=True,
        )

    async def _check_grammar(self, arrival: Arrival, sampling: SamplingInput) -> None:
        """Check that workers can compile the grammar of a request. Raises InvalidGrammar with the
        name of the client's field."""
        if sampling.grammar is None:
            return
        left = arrival.deadline_s - (self._clock() - arrival.at)
        try:
            salt = cache_salt(self._cluster_secret, arrival.caller.principal.tenant)
            await self._grammars.ready(sampling.grammar, salt, time.monotonic() + left)
        except InvalidGrammar as error:
            param = sampling.grammar_param
            raise InvalidGrammar(f"{param} cannot be used: {error.message}", param=param) from None

    def _request(
        self,
        arrival: Arrival,
        request_id: str,
        ids: tuple[int, ...],
        sampling: SamplingInput,
        default_max_tokens: int | None,
        param: str,
        priority: int | None,
        *,
        choices: int,
        shown_ids: tuple[int, ...] = (),
        chat: bool = False,
        embeds: bool = False,
    ) -> GenerationRequest:
        check_priority(priority)
        if not ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        caller = arrival.caller
        left = arrival.deadline_s - (self._clock() - arrival.at)
        if not embeds:
            sampling = with_defaults(sampling, self._model.sampling)
        if default_max_tokens is None and "max_tokens" in self._model.sampling:
            default_max_tokens = int(self._model.sampling["max_tokens"])
        scored = scored_tokens(sampling, choices, _max_scores(arrival))
        if scored is not None and (default_max_tokens is None or scored < default_max_tokens):
            default_max_tokens = scored
        if left <= 0:
            raise DeadlineExceeded("the request's deadline passed before it started")
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=ids,
            sampling=final_sampling(
                sampling,
                prompt_tokens=len(ids),
                context_length=self.context_length,
                vocab_size=self._tokenizer.vocab_size,
                default_max_tokens=default_max_tokens,
                prompt_param=param,
                eos_ids=self._tokenizer.eos_ids,
            ),
            principal=caller.principal,
            deadline_s=self._background_s if arrival.background else left,
            background=arrival.background,
            session=arrival.session,
            cache_salt=cache_salt(self._cluster_secret, caller.principal.tenant),
            priority=caller.priority if priority is None else priority,
            own_deadline=arrival.own_deadline,
            model=self._model.id,
            agent=arrival.labels.agent,
            run_id=arrival.labels.run_id,
            trace=arrival.trace,
            choices=choices,
            shows_stop_string=sampling.shows_stop_string,
            shows_special_tokens=sampling.shows_special_tokens,
            shown_ids=shown_ids,
            chat=chat,
            embeds=embeds,
        )


def _max_scores(arrival: Arrival) -> int:
    return MAX_LINE_SCORES if arrival.background else MAX_SCORES


def _check_scores(arrival: Arrival, requests: Sequence[GenerationRequest]) -> None:
    asked = [(len(one.prompt_ids), one.sampling, one.choices) for one in requests]
    check_scores(asked, _max_scores(arrival))


def check_priority(priority: int | None) -> None:
    """Check that a priority fits 32 bits. Raises InvalidRequest."""
    if priority is not None and not -(1 << 31) <= priority < 1 << 31:
        raise InvalidRequest("priority must be a 32-bit integer", param="priority")
