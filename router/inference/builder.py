"""From an API's input to a GenerationRequest: tokenized, checked, its sampling made final."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from baton.client.headers import DEADLINE_HEADER, SESSION_HEADER
from baton.config.cluster import Config
from baton.errors import (
    DeadlineExceeded,
    InvalidGrammar,
    InvalidRequest,
    ModelNotFound,
)
from baton.grammars.grammar_gate import GrammarGate
from baton.request import NO_TRACE, TraceContext
from baton.security.cluster_secret import cache_salt
from router.access.api_keys import Caller
from router.core.request import AnswerPart, Dispatcher, GenerationRequest, ReasoningMarkers
from router.core.served_model import ServedModel
from router.dialects.dialect import dialect_for
from router.dialects.tools import ToolUse
from router.inference.labels import NO_LABELS, Labels
from router.inference.prompt import Ending, Prompt, PromptEncoder, Turn
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
    check_scores,
    final_sampling,
    scored_tokens,
)
from router.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions."""
MAX_PROMPTS = 128
"""Prompts in one request."""
MAX_EMBEDDED = 2048
"""Inputs of one request for embeddings, as at OpenAI."""
_BUILT_AT_ONCE = 64
"""Requests that are built without yielding to the event loop."""
_SHOWN_ID_CHARACTERS = 128
_LAST_TOKENS = 16
"""Tokens at a prompt's end that hold the marker of reasoning and the white space behind it."""

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_EMBEDDED = SamplingInput(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request before its prompt is: for ids, deadline and accounts."""

    request_id: str
    """Unique; the prompts of a batch add their place to it."""
    at: float
    """When it came, in seconds of the monotonic clock."""
    deadline_s: float
    """Seconds from ``at``."""
    caller: Caller
    own_deadline: bool = False
    """``deadline_s`` is what the client asked for."""
    session: str = ""
    """What the client calls its conversation; empty: nothing was said."""
    trace: TraceContext = NO_TRACE
    """What the client says of its trace."""
    background: bool = False
    """A line of a batch: it waits for slack."""
    labels: Labels = NO_LABELS

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
        """By the names of ``headers`` in lower case; ``max_s`` bounds ``DEADLINE_HEADER``.

        ``own_deadline``: the client has set ``max_s``.

        Raises InvalidRequest.
        """
        given, session = headers.get(DEADLINE_HEADER, ""), headers.get(SESSION_HEADER, "")
        parent, trace = headers.get("traceparent", ""), NO_TRACE
        if parent:
            trace = TraceContext(parent, headers.get("tracestate", ""))
        labels = Labels.of_headers(headers)
        if not given:
            return cls(request_id, at, max_s, caller, own_deadline, session, trace, labels=labels)
        if not (given.isascii() and given.isdecimal() and len(given) <= 12 and int(given) > 0):
            raise InvalidRequest(
                f"{DEADLINE_HEADER} must be a whole number of milliseconds, at least 1",
                param=DEADLINE_HEADER,
            )
        deadline_s = min(max_s, int(given) / 1000)
        return cls(request_id, at, deadline_s, caller, True, session, trace, labels=labels)


class RequestBuilder:
    """Tokenises and checks. Raises InvalidRequest and its kin, ModelNotFound."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model: ServedModel,
        config: Config,
        grammars: GrammarGate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._model = model
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
        """For APIs that count a prompt's tokens without running it."""
        self._clock = clock
        self._grammars = grammars
        self._cluster_secret = config.cluster_secret
        self._background_s = config.request_deadline_s
        """Counts from the moment that a background request gets its turn."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer: the least of what model and workers have room for."""
        # Without workers, the dispatcher knows no bound; it will say itself that it has none.
        return min(self._model.context_length, self._dispatcher.context_length or 1 << 62)

    def check_model(self, model_id: str) -> None:
        """Raises ModelNotFound."""
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
        """A conversation; max_tokens defaults to the rest of the context.

        ``ending`` and ``variables`` are those of ``PromptEncoder.chat_ids``.
        Raises also InvalidRequest where a grammar and tools that must be called meet.
        """
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
        # Calls may follow the reasoning in place of content.
        to_content = sampling.grammar_param != "tools" if sampling.grammar else tools is None
        last = self._tokenizer.decode(ids[-_LAST_TOKENS:], skip_special_tokens=False)
        begins_in = answer_part(self.dialect.reasoning, ending, turns[-1]["content"], last)
        return self._reasoning(request, reasoning, begins_in, to_content=to_content)

    def variables(
        self, reasoning: ReasoningInput, given: Mapping[str, Any] = _NO_VARIABLES
    ) -> Mapping[str, Any]:
        """Of the chat template: those that are given, and what is asked of the reasoning.

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
        """The request with what is to be known of its answer's reasoning."""
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
        """Calls that must be are bound by a grammar, and those of strict functions."""
        special = self._tokenizer.special_ids(self.dialect.tools.texts)
        if sampling.grammar is not None and not tools.required:
            return sampling
        if sampling.grammar is not None:
            raise InvalidRequest(
                "an answer of a given form is not possible where tools must be called",
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
        """Plain prompts.

        ``default_max_tokens`` None takes the rest of the context; ``param`` is what the client
        calls its prompts.
        """
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
        self, arrival: Arrival, inputs: Sequence[Prompt]
    ) -> list[GenerationRequest]:
        """What is to be embedded, each text and each list of ids on its own."""
        if not all(inputs):
            raise InvalidRequest("input must not be empty", param="input")
        return await self.prompts(
            arrival, inputs, _EMBEDDED, 1, param="input", max_prompts=MAX_EMBEDDED, embeds=True
        )

    async def _check_grammar(self, arrival: Arrival, sampling: SamplingInput) -> None:
        """Raises InvalidGrammar, in the client's words, for one that no worker could follow."""
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
        scored = scored_tokens(sampling, choices, _max_scores(arrival))
        if scored is not None and (default_max_tokens is None or scored < default_max_tokens):
            default_max_tokens = scored
        if left <= 0:
            raise DeadlineExceeded("the request's time was up before it began")
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
    """Raises InvalidRequest."""
    if priority is not None and not -(1 << 31) <= priority < 1 << 31:
        raise InvalidRequest("priority must be a 32-bit integer", param="priority")
