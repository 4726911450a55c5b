"""Reads what a body asks of an answer: how many, and what beside text.

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
"""Answers to one prompt."""
MAX_ANSWERS = 1024
"""Answers to all prompts of a request."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client asks for beside text, and how much of it."""

    n: int = 1
    """Answers to each prompt that are shown."""
    best_of: int = 1
    """Answers to each prompt that are drawn."""
    logprobs: int | None = None
    """Likeliest tokens to tell beside each token's log probability; None: tell none."""
    prompt_logprobs: int | None = None
    """The same of the prompt, in a field of its own."""
    echo: bool = False
    """The prompt comes before each answer."""
    token_ids: bool = False
    """Tell the token ids of prompt and answer."""
    usage: bool = False
    """The stream ends with the usage."""
    continuous_usage: bool = False
    """Every event of the stream has the usage so far."""
    no_answer: bool = False
    """The prompt alone is shown: the one token that is drawn is not, and does not count."""

    @property
    def plain(self) -> bool:
        """Whether text is all."""
        asked = self.echo or self.token_ids
        return self.logprobs is None and self.prompt_logprobs is None and not asked


def chat_options(body: ChatCompletionRequest) -> AnswerOptions:
    """What a chat request asks for."""
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
    """What a request for completions of so many prompts asks for."""
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
        raise InvalidRequest(f"at most {MAX_ANSWERS} answers a request are possible", param="n")
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
    """The log probabilities that workers are asked for: of the answer, of the prompt."""
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
        raise InvalidRequest("stream_options is only for stream: true", param="stream_options")
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
        raise InvalidRequest("prompt_logprobs is not for stream: true", param="prompt_logprobs")
    return _count("prompt_logprobs", body.prompt_logprobs)


class TemplateFields(Protocol):
    """The fields of a body that say how the chat template is used."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> Any: ...


def template_options(body: TemplateFields) -> tuple[Ending, dict[str, Any]]:
    """How the prompt ends, and more variables of the chat template. Raises InvalidRequest."""
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
    """What a chat request asks of the reasoning. Raises InvalidRequest."""
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
