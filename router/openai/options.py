"""Reads the options of an answer from a body: the number of choices, and details besides text.

Functions raise InvalidRequest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from baton.errors import InvalidRequest
from baton.logprobs import MAX_TOP_LOGPROBS
from router.inference.prompt import Ending, checked_variables
from router.inference.reasoning import (
    ReasoningInput,
    checked_budget,
    checked_effort,
    checked_thinking,
)
from router.openai.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields

MAX_CHOICES = 128
"""Maximum number of answers to one prompt."""
MAX_ANSWERS = 1024
"""Maximum number of answers to all prompts of a request."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The number of answers that a client requests, and the details that it requests in addition to
    text."""

    n: int = 1
    """Number of answers to each prompt that are returned."""
    best_of: int = 1
    """Number of answers to each prompt that are generated."""
    logprobs: int | None = None
    """Number of most likely tokens returned with each token's log probability; None: no log
    probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens returned with the log probability of each prompt token, in a
    field of their own; None: no log probabilities of the prompt."""
    echo: bool = False
    """Whether the prompt precedes each answer."""
    token_ids: bool = False
    """Whether the token ids of prompt and answer are returned."""
    usage: bool = False
    """Whether the stream ends with an event that has the token counts of the request
    (``usage``)."""
    continuous_usage: bool = False
    """Whether every event of the stream has the token counts up to it (``usage``)."""
    no_answer: bool = False
    """Whether only the prompt is returned. The one token that is sampled is neither shown nor
    counted."""

    @property
    def plain(self) -> bool:
        """Whether the answer has only text, without any details."""
        asked = self.echo or self.token_ids
        return self.logprobs is None and self.prompt_logprobs is None and not asked


def chat_options(body: ChatCompletionRequest) -> AnswerOptions:
    """Read the options of a chat request."""
    logprobs = _count("top_logprobs", body.top_logprobs)
    if logprobs is not None and not body.logprobs:
        if logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        logprobs = None
    if body.logprobs and logprobs is None:
        logprobs = 0
    n = _choices("n", body.n)
    return AnswerOptions(
        n=n,
        best_of=n,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        token_ids=bool(body.return_token_ids),
        **_usage(body),
    )


def completion_options(body: CompletionRequest, prompts: int) -> AnswerOptions:
    """Read the options of a request for completions of ``prompts`` prompts."""
    n = _choices("n", body.n)
    best_of = n if not body.best_of else _choices("best_of", body.best_of)
    if best_of < n:
        raise InvalidRequest("best_of must be at least n", param="best_of")
    if best_of > n and body.stream:
        raise InvalidRequest(
            "best_of chooses among whole answers: it cannot be more than n with stream",
            param="best_of",
        )
    if prompts * best_of > MAX_ANSWERS:
        raise InvalidRequest(f"prompts times best_of must be at most {MAX_ANSWERS}", param="n")
    return AnswerOptions(
        n=n,
        best_of=best_of,
        logprobs=_count("logprobs", body.logprobs),
        prompt_logprobs=_prompt_logprobs(body),
        echo=bool(body.echo),
        token_ids=bool(body.return_token_ids),
        no_answer=bool(body.echo) and body.max_tokens == 0,
        **_usage(body),
    )


def scoring(options: AnswerOptions) -> tuple[int | None, int | None]:
    """Return two numbers of most likely tokens for which workers must compute log probabilities: at
    the answer's positions, and at the prompt's. None means no log probabilities."""
    logprobs = options.logprobs
    if logprobs is None and options.best_of > options.n:
        logprobs = 0
    wanted = [options.prompt_logprobs, options.logprobs if options.echo else None]
    return logprobs, max((count for count in wanted if count is not None), default=None)


def _usage(body: SamplingFields) -> dict[str, bool]:
    options = body.stream_options
    if options is None:
        return {}
    if not body.stream:
        raise InvalidRequest("stream_options requires stream: true", param="stream_options")
    usage = bool(options.include_usage)
    return {"usage": usage, "continuous_usage": usage and bool(options.continuous_usage_stats)}


def _choices(name: str, given: int | None) -> int:
    if given is None:
        return 1
    if not 1 <= given <= MAX_CHOICES:
        raise InvalidRequest(f"{name} must be between 1 and {MAX_CHOICES}", param=name)
    return given


def _count(name: str, given: int | None) -> int | None:
    if given is not None and not 0 <= given <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}", param=name)
    return given


def _prompt_logprobs(body: SamplingFields) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs cannot be combined with stream: true", param="prompt_logprobs"
        )
    return _count("prompt_logprobs", body.prompt_logprobs)


class TemplateFields(Protocol):
    """The fields of a body that control the chat template."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> Any: ...


def template_options(body: TemplateFields) -> tuple[Ending, dict[str, Any]]:
    """Return how the chat template ends the prompt, and the client's other variables for the
    template. Raises InvalidRequest."""
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    variables = {} if body.chat_template_kwargs is None else body.chat_template_kwargs
    if not isinstance(variables, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    checked_variables(variables, "chat_template_kwargs")
    if continued:
        return "open", variables
    return "closed" if body.add_generation_prompt is False else "answer", variables


def reasoning_options(body: ChatCompletionRequest) -> ReasoningInput:
    """Read the reasoning settings of a chat request. Raises InvalidRequest."""
    thinking = checked_thinking(body.thinking)
    for name in ("enable_thinking", "thinking_token_budget"):
        if body.thinking is not None and getattr(body, name) is not None:
            raise InvalidRequest(f"{name} and thinking exclude each other", param=name)
    found = replace(thinking, effort=checked_effort(body.reasoning_effort, "reasoning_effort"))
    if body.thinking is None:
        name = "thinking_token_budget"
        budget = checked_budget(body.thinking_token_budget, name)
        found = replace(found, enabled=body.enable_thinking, budget=budget, budget_param=name)
    return found
